"""The two sides of a benchmark: who they are, how they are called, and the labels of their numbers."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kernel_depot.kernels.attention import Attention, Backend, MaskMode, choose_backend
from kernel_depot.kernels.memory import CUDA, Device
from kernel_depot.kernels.runtime import device_sm
from kernel_depot.kernels.uri import batch_prefill_uri
from kernel_depot.opponent.errors import ChallengerInvalid
from kernel_depot.opponent.ragged_prefill import (
    opened,
    ragged_prefill_bf16_hd128,
    ragged_prefill_bf16_hd256,
)
from kernel_depot.opponent.shapes import Shape

SDPA: Final = "sdpa"
SINGLE_CALLS: Final = "single-calls"


@dataclass(frozen=True)
class Batch:
    """What both sides get: bf16 tensors on the device, indptr on the host and (int32) on the device."""

    shape: Shape
    q: Any
    k: Any
    v: Any
    out: Any
    indptr: list[int]
    indptr_device: Any
    longest: int
    sm_scale: float


Call = Callable[[Batch], Any]
"""Computes a batch; returns the result where it is not in `out`."""


@dataclass(frozen=True)
class Side:
    """One of the two. `host_counts` asks for time that includes what the host does."""

    name: str
    version: str
    call: Call
    digest: str | None = None
    host_counts: bool = False


def opponent_side(shape: Shape, *, cache: Path | None) -> Side:
    """Return FlashInfer's ragged prefill for a shape. Raise as its gates do, ModuleMissing."""
    runtime = opened(cache)
    mask = MaskMode.CAUSAL if shape.causal else MaskMode.NONE
    heads = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim)
    attention = Attention(*heads, "bf16", "bf16", "bf16", mask=mask)
    backend = choose_backend(attention, Backend.AUTO, sm=device_sm(Device(CUDA)))
    file = runtime.module(batch_prefill_uri(attention, backend, runtime.release)).file
    function = ragged_prefill_bf16_hd128 if shape.head_dim == 128 else ragged_prefill_bf16_hd256

    def call(batch: Batch) -> None:
        function(
            batch.q,
            batch.k,
            batch.v,
            batch.indptr,
            batch.indptr,
            out=batch.out,
            causal=batch.shape.causal,
            sm_scale=batch.sm_scale,
            cache=cache,
        )

    version = ".".join(map(str, runtime.release))
    return Side(f"FlashInfer ragged prefill, {backend}", version, call, file.sha256)


def challenger_side(name: str, *, opponent: Side) -> Side:
    """Return `sdpa`, `single-calls` (the opponent, a call for each request) or `module:function`.

    Raise ChallengerInvalid.
    """
    if name == SDPA:
        return _sdpa()
    if name == SINGLE_CALLS:
        return _single_calls(opponent)
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise ChallengerInvalid(
            f"there is no challenger called {name!r}",
            expected=f"{SDPA}, {SINGLE_CALLS}, or module:function",
            found=name,
        )
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name)
    except (ImportError, AttributeError) as error:
        raise ChallengerInvalid(
            f"the challenger {name} cannot be imported: {error}",
            found=name,
            remedy="put its directory on PYTHONPATH",
        ) from error
    if not callable(function):
        raise ChallengerInvalid(f"the challenger {name} is no function", found=type(function).__name__)

    def call(batch: Batch) -> Any:
        return function(
            batch.q,
            batch.k,
            batch.v,
            batch.indptr_device,
            batch.indptr_device,
            out=batch.out,
            causal=batch.shape.causal,
            sm_scale=batch.sm_scale,
            max_qo_len=batch.longest,
            max_kv_len=batch.longest,
        )

    return Side(name, str(getattr(module, "__version__", "unknown")), call)


def _sdpa() -> Side:
    """Torch's own: the flash kernel that its scaled_dot_product_attention takes for nested tensors."""
    import torch

    def call(batch: Batch) -> Any:
        return torch.ops.aten._flash_attention_forward(
            batch.q,
            batch.k,
            batch.v,
            batch.indptr_device,
            batch.indptr_device,
            batch.longest,
            batch.longest,
            0.0,
            batch.shape.causal,
            False,
            scale=batch.sm_scale,
        )[0]

    return Side("torch SDPA, flash, packed sequences", torch.__version__, call)


def _single_calls(opponent: Side) -> Side:
    import torch

    def call(batch: Batch) -> None:
        for start, end in itertools.pairwise(batch.indptr):
            rows = slice(start, end)
            one = Batch(
                batch.shape,
                batch.q[rows],
                batch.k[rows],
                batch.v[rows],
                batch.out[rows],
                [0, end - start],
                torch.empty(0),
                end - start,
                batch.sm_scale,
            )
            opponent.call(one)

    return Side(
        f"{opponent.name}, a call for each request", opponent.version, call, opponent.digest, host_counts=True
    )
