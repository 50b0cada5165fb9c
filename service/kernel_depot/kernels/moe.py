"""CUTLASS fused mixture of experts, of the modules `fused_moe_90`, `_100`, `_103` and `_120`.

Argument lists: flashinfer csrc/fused_moe/cutlass_backend/flashinfer_cutlass_fused_moe_binding.cu, 0.6.3 to
0.7.4. The module makes a runner for data types and flags; its functions live as long as it does.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Final

from kernel_depot.kernels.allocator import ensure_allocator
from kernel_depot.kernels.attention import HALVES, require_integer, require_positive
from kernel_depot.kernels.errors import InvalidArgument, KernelCallFailed, KernelError
from kernel_depot.kernels.memory import Device
from kernel_depot.kernels.runtime import (
    CALL_ERRORS,
    DEEP_GEMM,
    Function,
    Module,
    Runtime,
    default_runtime,
    device_sm,
)
from kernel_depot.kernels.signatures import Sent
from kernel_depot.kernels.streams import current_stream
from kernel_depot.kernels.tensors import (
    Tensor,
    owned,
    read_optional,
    read_tensor,
    require_contiguous,
    require_dtype,
    require_filled,
    require_rank,
    require_same_device,
    require_shape,
)
from kernel_depot.kernels.uri import Release, fused_moe_uri

BLOCK: Final = 128
"""Rows and columns of a weight that share one DeepSeek scale, and what its dimensions are multiples of."""

_CUDA_HEADER: Final = "cuda_fp8.h"

_T, _M, _I, _B = Sent.TENSOR, Sent.MAYBE, Sent.INT, Sent.BOOL


class HeadersMissing(KernelError):
    """DeepSeek's block scales compile their kernels at run time, from headers that are not there."""

    slug = "kernel-headers-missing"
    title = "Headers that a kernel compiles at run time are missing"
    status = 409


class Activation(str, Enum):
    """What is between the two products. SWIGLU, GEGLU and SWIGLU_BIAS are gated: fc1 has twice the rows."""

    GELU = "gelu"
    RELU = "relu"
    SILU = "silu"
    SWIGLU = "swiglu"
    GEGLU = "geglu"
    SWIGLU_BIAS = "swiglu_bias"
    RELU2 = "relu2"
    IDENTITY = "identity"

    @property
    def is_gated(self) -> bool:
        """Tell whether half of the first product gates the other half."""
        return self in (Activation.SWIGLU, Activation.GEGLU, Activation.SWIGLU_BIAS)

    def number(self, release: Release) -> int:
        """Return the kernels' number of it; that of IDENTITY moved twice (flashinfer/tllm_enums.py)."""
        if self is Activation.IDENTITY:
            return 7 if release < (0, 6, 13) else 8 if release < (0, 6, 14) else 9
        return list(Activation).index(self)


class Precision(str, Enum):
    """HALF: all f16 or all bf16. FP8: e4m3 with scales for each expert. DEEPSEEK: e4m3 weights in blocks."""

    HALF = "half"
    FP8 = "fp8"
    DEEPSEEK = "deepseek"


@dataclass(frozen=True)
class Parallelism:
    """Which part of the experts this device has: of each (tensor parallel), or some (expert parallel)."""

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0

    def __post_init__(self) -> None:
        for kind in ("tp", "ep"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            require_positive(f"{kind}_size", size)
            require_integer(f"{kind}_rank", rank, at_least=0)
            if rank >= size:
                raise InvalidArgument(f"{kind}_rank", expected=f"less than {kind}_size ({size})", found=rank)


@dataclass(frozen=True)
class Fp8Scales:
    """Float32 scales of FP8, in the kernel's order; [experts] but for the input's, which has no dimension.

    `fc2_quant` may be one number for all experts, without a dimension.
    """

    fc1_dequant: Any
    fc2_quant: Any
    fc2_dequant: Any
    fc1_input_dequant: Any


@dataclass(frozen=True)
class BlockScales:
    """Float32 scales of DeepSeek's weights: fc1 [experts, rows/128, hidden/128], fc2 [experts, hidden/128,
    inter/128].
    """

    fc1: Any
    fc2: Any


@dataclass(frozen=True)
class Weights:
    """Of the experts on this device: fc1 [experts, inter, hidden], or twice `inter` rows where gated, the
    linear half before the gate; fc2 [experts, hidden, inter]. Biases [experts, rows], both or none.
    """

    fc1: Any
    fc2: Any
    fc1_bias: Any | None = None
    fc2_bias: Any | None = None
    scales: Fp8Scales | BlockScales | None = None


class FusedMoe:
    """A mixture of experts of one kind on one device. Raises as its module is looked up.

    `dtype` is that of the output: f16 or bf16. For DEEPSEEK `headers` are directories to compile from, one
    with DeepGEMM's (`deep_gemm/`, from flashinfer-python's data/csrc/nv_internal/tensorrt_llm); None: the
    bundle's. Raise InvalidArgument, ModuleMissing, NoCodeForGpu, SignatureMismatch, HeadersMissing,
    KernelCallFailed.
    """

    def __init__(
        self,
        *,
        dtype: str,
        device: Device,
        precision: Precision = Precision.HALF,
        activation: Activation = Activation.SWIGLU,
        parallelism: Parallelism | None = None,
        headers: Sequence[Path] | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        runtime = runtime or default_runtime()
        if dtype not in HALVES:
            raise InvalidArgument("dtype", expected="f16 or bf16", found=dtype)
        sm = device_sm(device)
        if sm is None:
            raise InvalidArgument("device", expected="a CUDA device", found=str(device))
        if precision is Precision.DEEPSEEK:
            if (sm.major, sm.minor) != (9, 0):
                raise InvalidArgument("precision", expected="half or fp8 on any GPU but sm90", found=str(sm))
            if dtype != "bf16":
                raise InvalidArgument("dtype", expected="bf16 with DeepSeek's block scales", found=dtype)
        self.dtype = dtype
        self.device = device
        self.precision = precision
        self.activation = activation
        self.parallelism = parallelism or Parallelism()
        self.uri = fused_moe_uri(str(sm))
        self.module = runtime.module(self.uri, device=device)
        self._release = runtime.release
        if precision is Precision.DEEPSEEK:
            _set_headers(self.module, runtime, headers)
        dtype_input, dtype_weight = {
            Precision.HALF: (dtype, dtype),
            Precision.FP8: ("e4m3", "e4m3"),
            Precision.DEEPSEEK: ("bf16", "e4m3"),
        }[precision]
        self.dtype_input, self.dtype_weight = dtype_input, dtype_weight
        flags = (precision is Precision.DEEPSEEK, False, False, False, *_init_tail(self._release))
        self._runner = _Runner.of(self.module, (dtype_input, dtype_weight, dtype), flags)
        self._run = self._runner.function("run_moe", _run_sends(self._release))

    def tactics(self) -> tuple[int, int]:
        """Return how many profiles the first and the second product may choose from."""
        return self._runner.count("get_gemm1_tactic_count"), self._runner.count("get_gemm2_tactic_count")

    def run(
        self,
        x: Any,
        experts: Any,
        weights: Weights,
        out: Any,
        *,
        expert_scales: Any | None = None,
        swiglu_alpha: Any | None = None,
        swiglu_beta: Any | None = None,
        swiglu_limit: Any | None = None,
        profile_ids: tuple[int | None, int | None] | None = None,
        enable_pdl: bool = False,
        stream: object = None,
    ) -> None:
        """Write the sum of each token's experts into `out` [tokens, hidden], on `stream` or the current one.

        `x` [tokens, hidden]; `experts` int32 and `expert_scales` float32 [tokens, experts of a token] (1
        where None). `swiglu_*` float32 [experts], with SWIGLU_BIAS. `profile_ids` number the tactics of each
        product from 0; None is the first. All contiguous. Raise InvalidArgument, KernelCallFailed.
        """
        tensors = self._check(x, experts, weights, out, expert_scales)
        local = tensors[3].shape[0]
        for name, value in (
            ("swiglu_alpha", swiglu_alpha),
            ("swiglu_beta", swiglu_beta),
            ("swiglu_limit", swiglu_limit),
        ):
            tensor = read_optional(name, value)
            if tensor is None:
                continue
            if self.activation is not Activation.SWIGLU_BIAS:
                raise InvalidArgument(name, expected="None without SWIGLU_BIAS", found=tensor.form)
            _require(tensor, ("f32",), (local,), why="experts")
            tensors.append(tensor)
        scales = self._read_scales(weights, tensors)
        found = require_same_device(tensors)
        if found != self.device:
            raise InvalidArgument("x", expected=str(self.device), found=str(found))
        ensure_allocator()
        part = self.parallelism
        self._run.on(
            self.device,
            current_stream(self.device) if stream is None else stream,
            (
                out,
                x,
                experts,
                expert_scales,
                weights.fc1,
                weights.fc1_bias,
                weights.fc2,
                weights.fc2_bias,
                scales,
                None,
                swiglu_alpha,
                swiglu_beta,
                swiglu_limit,
                *_activation_tail(self._release),
                part.tp_size,
                part.tp_rank,
                part.ep_size,
                part.ep_rank,
                1,
                0,
                False,
                False,
                self._profiles(profile_ids),
                bool(enable_pdl),
                self.activation.number(self._release),
                *_run_tail(self._release),
            ),
        )

    def _check(self, x: Any, experts: Any, weights: Weights, out: Any, expert_scales: Any) -> list[Tensor]:
        """Return x, out, experts, fc1, fc2 and what else there is, checked."""
        rows = read_tensor("x", x)
        require_rank(rows, 2)
        require_filled(rows)
        tokens, hidden = rows.shape
        _require(rows, (self.dtype_input,), rows.shape, why="tokens, hidden")
        result = read_tensor("out", out)
        _require(result, (self.dtype,), (tokens, hidden), why="tokens, hidden")
        chosen = read_tensor("experts", experts)
        _require(chosen, ("i32",), (tokens, None), why="tokens, experts of a token")
        require_filled(chosen)
        fc1, fc2 = read_tensor("weights.fc1", weights.fc1), read_tensor("weights.fc2", weights.fc2)
        require_rank(fc2, 3)
        local, _, inter = fc2.shape
        _require(fc2, (self.dtype_weight,), (None, hidden, None), why="experts, hidden, inter")
        require_filled(fc2)
        height = inter * 2 if self.activation.is_gated else inter
        _require(fc1, (self.dtype_weight,), (local, height, hidden), why=f"{self.activation.value}, fc2, x")
        least = {Precision.HALF: 8, Precision.FP8: 16, Precision.DEEPSEEK: BLOCK}[self.precision]
        for name, length in (("hidden", hidden), ("inter", inter)):
            if length % least:
                raise InvalidArgument(
                    "x" if name == "hidden" else "weights.fc2",
                    expected=f"{name} divisible by {least} ({self.precision.value})",
                    found=length,
                )
        total = local * self.parallelism.ep_size
        if chosen.shape[1] > total:
            raise InvalidArgument(
                "experts", expected=f"at most {total} a token, all there are", found=chosen.shape[1]
            )
        tensors = [rows, result, chosen, fc1, fc2]
        if (gates := read_optional("expert_scales", expert_scales)) is not None:
            _require(gates, ("f32",), chosen.shape, why="the shape of experts")
            tensors.append(gates)
        biases = [
            read_optional(f"weights.{name}_bias", getattr(weights, f"{name}_bias")) for name in ("fc1", "fc2")
        ]
        for bias, other, length in zip(biases, reversed(biases), (height, hidden), strict=True):
            if bias is None:
                continue
            if other is None:
                raise InvalidArgument(bias.name, expected="both biases or none", found="one")
            _require(bias, (self.dtype,), (local, length), why="experts, rows of the weight")
            tensors.append(bias)
        return tensors

    def _read_scales(self, weights: Weights, tensors: list[Tensor]) -> list[Any] | None:
        """Return the weights' scales in the kernel's order; they join `tensors`."""
        given = weights.scales
        wanted = {Precision.HALF: None, Precision.FP8: Fp8Scales, Precision.DEEPSEEK: BlockScales}[
            self.precision
        ]
        if (type(given) if given is not None else None) is not wanted:
            raise InvalidArgument(
                "weights.scales",
                expected=f"{wanted.__name__ if wanted else None} with {self.precision.value}",
                found=type(given).__name__,
            )
        local, hidden, inter = tensors[4].shape
        height = tensors[3].shape[1]
        parts: list[tuple[str, Any, tuple[int, ...]]] = []
        if isinstance(given, Fp8Scales):
            parts = [
                ("fc1_dequant", given.fc1_dequant, (local,)),
                ("fc2_quant", given.fc2_quant, (local,)),
                ("fc2_dequant", given.fc2_dequant, (local,)),
                ("fc1_input_dequant", given.fc1_input_dequant, ()),
            ]
        elif isinstance(given, BlockScales):
            parts = [
                ("fc1", given.fc1, (local, height // BLOCK, hidden // BLOCK)),
                ("fc2", given.fc2, (local, hidden // BLOCK, inter // BLOCK)),
            ]
        for name, value, shape in parts:
            tensor = read_tensor(f"weights.scales.{name}", value)
            one = name == "fc2_quant" and tensor.shape == ()
            _require(tensor, ("f32",), () if one else shape, why="experts" if shape else "no dimension")
            tensors.append(tensor)
        return [owned(value) for _, value, _ in parts] or None

    def _profiles(self, profile_ids: tuple[int | None, int | None] | None) -> list[int] | None:
        """Return the numbers as the kernel counts: from 0.6.18 on the second product's follow the first's."""
        if profile_ids is None:
            return None
        counts, numbers = self.tactics(), []
        for at, (given, count) in enumerate(zip(profile_ids, counts, strict=True)):
            if given is None:
                numbers.append(-1)
                continue
            require_integer(f"profile_ids[{at}]", given, at_least=0)
            if given >= count:
                raise InvalidArgument(f"profile_ids[{at}]", expected=f"less than {count}", found=given)
            numbers.append(given + (counts[0] if at and self._release >= (0, 6, 18) else 0))
        return numbers


class _Runner:
    """A runner that the module made, and its functions; it goes when the last FusedMoe that uses it does."""

    known: ClassVar[weakref.WeakValueDictionary[tuple[Any, ...], _Runner]] = weakref.WeakValueDictionary()
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, module: Module, made: Any) -> None:
        self._module = module
        self._made = made
        self._functions: dict[str, Function] = {}

    @classmethod
    def of(cls, module: Module, dtypes: tuple[str, str, str], flags: tuple[bool, ...]) -> _Runner:
        """Return the runner of a module for data types and flags, made when there is none."""
        import tvm_ffi

        key = (id(module), dtypes, flags)
        with cls.lock:
            runner = cls.known.get(key)
            if runner is None or runner._module is not module:
                words = {"f16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn"}
                init = module.function("init", (Sent.DTYPE,) * 3 + (_B,) * len(flags))
                runner = cls(module, init(*(tvm_ffi.dtype(words[name]) for name in dtypes), *flags))
                cls.known[key] = runner
            return runner

    def function(self, name: str, sends: tuple[Sent, ...]) -> Function:
        """Return one of the runner's functions, its signature checked. Raise SignatureMismatch."""
        if name not in self._functions:
            self._functions[name] = self._module.check(name, self._made[name], sends)
        return self._functions[name]

    def count(self, name: str) -> int:
        """Return what a function without arguments counts. Raise KernelCallFailed."""
        try:
            return int(self._made[name]())
        except CALL_ERRORS as error:
            raise KernelCallFailed(name, where=str(self._module.file.path), error=error) from error


def _require(tensor: Tensor, dtypes: Sequence[str], shape: Sequence[int | None], *, why: str) -> None:
    require_dtype(tensor, *dtypes)
    require_shape(tensor, shape, why=why)
    require_contiguous(tensor)


def _set_headers(module: Module, runtime: Runtime, headers: Sequence[Path] | None) -> None:
    places = [Path(directory) for directory in (runtime.headers if headers is None else headers)]
    if not any((place / DEEP_GEMM).is_file() for place in places):
        raise HeadersMissing(
            "DeepSeek's block scales are compiled at run time, from headers that are not here",
            where=", ".join(map(str, places)) or runtime.where,
            expected=DEEP_GEMM,
            found="no directory" if not places else "no such file",
            remedy="activate pins of the modules' own flashinfer_python (for 0.6.3 the shipped set "
            "flashinfer-moe-headers-0.6.3) and sync with the view files; or give headers=[DIR], with DIR "
            "that wheel's folder flashinfer/data/csrc/nv_internal/tensorrt_llm",
        )
    if not any((place / _CUDA_HEADER).is_file() for place in places):
        places.append(_cuda_headers())
    module.function("set_deepgemm_jit_include_dirs", (Sent.STRINGS,))([str(place) for place in places])


def _cuda_headers() -> Path:
    """Return CUDA's own directory of headers, which NVRTC does not look for. Raise HeadersMissing."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    if found is None or not (Path(found) / _CUDA_HEADER).is_file():
        raise HeadersMissing(
            "DeepSeek's block scales are compiled at run time, and CUDA's own headers are not here",
            where=found,
            expected=_CUDA_HEADER,
            found="no directory" if found is None else "no such file",
            remedy="install nvidia-cuda-runtime of the modules' CUDA, which torch brings, or set CUDA_HOME",
        )
    return Path(found)


def _init_tail(release: Release) -> tuple[bool, ...]:
    """use_fused_finalize from 0.6.15 on, use_wfp4afp8_humming in 0.6.16 and from 0.6.18 on."""
    tail: tuple[bool, ...] = (True,) if release >= (0, 6, 15) else ()
    return (*tail, False) if release[:3] == (0, 6, 16) or release >= (0, 6, 18) else tail


def _activation_tail(release: Release) -> tuple[Any, ...]:
    """clamped_relu2_limit (0.7), situ_beta and situ_linear_beta (0.7), swizzled_input_sf (0.6.8)."""
    limits = (None, None, None) if release >= (0, 7) else ()
    return (*limits, True) if release >= (0, 6, 8) else limits


def _run_tail(release: Release) -> tuple[Any, ...]:
    """workspace_buffer (0.6.16) and nvfp4_4over6_code (0.7)."""
    tail: tuple[Any, ...] = (None,) if release >= (0, 6, 16) else ()
    return (*tail, 0) if release >= (0, 7) else tail


def _run_sends(release: Release) -> tuple[Sent, ...]:
    optional = (_T, _T, _T, _M, _T, _M, _T, _M, Sent.TENSORS, _M, _M, _M, _M)
    limits = tuple(_M if value is None else _B for value in _activation_tail(release))
    tail = tuple(_M if value is None else _I for value in _run_tail(release))
    ranks = (_I,) * 6 + (_B, _B, Sent.MAYBE_INTS, _B, _I)
    return (*optional, *limits, *ranks, *tail)
