"""The names of FlashInfer's kernel modules, from their parameters and the version they were compiled from.

Spelled as flashinfer/jit/attention/modules.py and flashinfer/jit/fused_moe.py spell them, 0.6.3 to 0.7.4.
"""

from __future__ import annotations

from typing import Final

from kernel_depot.kernels.attention import Attention, Backend
from kernel_depot.kernels.errors import InvalidArgument

Release = tuple[int, ...]
"""The numbers of a public version: (0, 6, 3)."""

NORM: Final = "norm"
PAGE: Final = "page"
GDN_PREFILL: Final = "gdn_prefill_sm90"

_KV: Final = "with_kv_cache_dtype_q_{dtype_q}_dtype_kv_{dtype_kv}_dtype_o_{dtype_o}"
_IDX: Final = "_dtype_idx_{dtype_idx}"
_DIMS: Final = (
    "_head_dim_qk_{head_dim_qk}_head_dim_vo_{head_dim_vo}_posenc_{posenc}_use_swa_{use_swa}"
    "_use_logits_cap_{use_logits_cap}"
)

SINGLE_DECODE: Final = f"single_decode_{_KV}{_DIMS}"
BATCH_DECODE: Final = f"batch_decode_{_KV}{_IDX}{_DIMS}"
SINGLE_PREFILL: Final = f"single_prefill_{_KV}{_DIMS}_f16qk_{{f16qk}}"
BATCH_PREFILL: Final = f"batch_prefill_{_KV}{_IDX}{_DIMS}_f16qk_{{f16qk}}"
BATCH_MLA: Final = (
    "batch_mla_attention_dtype_q_{dtype_q}_dtype_kv_{dtype_kv}_dtype_o_{dtype_o}"
    f"{_IDX}_head_dim_ckv_{{head_dim_ckv}}_head_dim_kpe_{{head_dim_kpe}}_profiler_{{profiler}}"
)
"""Templates; what a backend or a version adds comes behind."""

SM90: Final = "_sm90"
KV_STRIDE_EQUAL: Final = "_kv_stride_equal"
PLAN_ABI_2: Final = "_planabi2"

_MOE: Final = {"89": "89", "90": "90", "100": "100", "103": "103", "110": "100", "120": "120", "121": "120"}
"""The module that serves a capability (flashinfer/fused_moe/core.py)."""


def single_prefill_uri(attention: Attention, backend: Backend) -> str:
    """Return the name of a single-request prefill module; it is the same in every release."""
    return SINGLE_PREFILL.format_map(_parameters(attention)) + _backend(backend)


def batch_prefill_uri(attention: Attention, backend: Backend, release: Release) -> str:
    """Return the name of the batch prefill module that release compiles for caches of equal strides."""
    base = BATCH_PREFILL.format_map(_parameters(attention))
    equal = KV_STRIDE_EQUAL if backend is Backend.FA2 and release >= (0, 7) else ""
    return base + equal + _backend(backend)


def single_decode_uri(attention: Attention) -> str:
    """Return the name of a single-request decode module."""
    return SINGLE_DECODE.format_map(_parameters(attention))


def batch_decode_uri(attention: Attention) -> str:
    """Return the name of a batch decode module."""
    return BATCH_DECODE.format_map(_parameters(attention))


def batch_mla_uri(
    *,
    dtype_q: str,
    dtype_kv: str,
    dtype_o: str,
    head_dim_ckv: int,
    head_dim_kpe: int,
    backend: Backend,
    release: Release,
) -> str:
    """Return the name of a batch MLA module."""
    base = BATCH_MLA.format(
        dtype_q=dtype_q,
        dtype_kv=dtype_kv,
        dtype_o=dtype_o,
        dtype_idx="i32",
        head_dim_ckv=head_dim_ckv,
        head_dim_kpe=head_dim_kpe,
        profiler=False,
    )
    return base + (PLAN_ABI_2 if release >= (0, 7) else "") + _backend(backend)


def fused_moe_uri(sm: str) -> str:
    """Return the name of the CUTLASS fused MoE module that serves a GPU, such as `sm121`.

    Raise InvalidArgument for a GPU that none serves.
    """
    digits = sm.removeprefix("sm").rstrip("af")
    if digits not in _MOE:
        wanted = ", ".join(f"sm{number}" for number in _MOE)
        raise InvalidArgument("sm", expected=f"a GPU that has a CUTLASS fused MoE: {wanted}", found=sm)
    return f"fused_moe_{_MOE[digits]}"


def _parameters(attention: Attention) -> dict[str, object]:
    return {
        "dtype_q": attention.dtype_q,
        "dtype_kv": attention.dtype_kv,
        "dtype_o": attention.dtype_o,
        "dtype_idx": "i32",
        "head_dim_qk": attention.head_dim_qk,
        "head_dim_vo": attention.head_dim_vo,
        "posenc": int(attention.pos_encoding),
        "use_swa": attention.window_left >= 0,
        "use_logits_cap": attention.logits_soft_cap > 0.0,
        "f16qk": attention.f16_qk_reduction,
    }


def _backend(backend: Backend) -> str:
    return SM90 if backend is Backend.FA3 else ""
