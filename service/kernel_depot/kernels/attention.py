"""What an attention kernel computes, as one checked value, and which of FlashInfer's backends computes it.

Numbers of the enums are those of flashinfer's C++ headers (layout.cuh, mask.cuh, pos_enc.cuh), the same from
0.6.3 to 0.7.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.platform import Sm


class Layout(IntEnum):
    """The order of a key or value tensor's dimensions: token, head, dimension, or head, token, dimension."""

    NHD = 0
    HND = 1


class MaskMode(IntEnum):
    """Which keys a query sees."""

    NONE = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTI_ITEM = 3


class PosEncoding(IntEnum):
    """What the kernel itself does about positions."""

    NONE = 0
    ROPE = 1
    ALIBI = 2


class Backend(str, Enum):
    """FlashAttention 2, FlashAttention 3 (Hopper only), or what FlashInfer would take."""

    AUTO = "auto"
    FA2 = "fa2"
    FA3 = "fa3"

    def __str__(self) -> str:
        return self.value


FP8: Final = frozenset({"e4m3", "e5m2"})
"""The eight-bit float types, as module names spell them."""

HALVES: Final = frozenset({"f16", "bf16"})

FA3_HEAD_DIMS: Final = frozenset({(64, 64), (128, 128), (192, 128), (256, 256)})
"""The (head_dim_qk, head_dim_vo) that FlashInfer's Hopper kernels are written for (flashinfer/aot.py)."""

ROPE_SCALE: Final = 1.0
ROPE_THETA: Final = 1e4


@dataclass(frozen=True)
class Attention:
    """One kind of attention. Data types are spelled as in module names (`f16`, `bf16`, `e4m3`).

    `sm_scale` None stands for 1/sqrt(head_dim_qk); `window_left` -1 and `logits_soft_cap` 0.0 mean off.
    Raise InvalidArgument for values outside their domains, and for pairs that exclude each other.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    dtype_q: str
    dtype_kv: str
    dtype_o: str
    mask: MaskMode = MaskMode.NONE
    layout: Layout = Layout.NHD
    pos_encoding: PosEncoding = PosEncoding.NONE
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sm_scale: float | None = None
    rope_scale: float = ROPE_SCALE
    rope_theta: float = ROPE_THETA
    f16_qk_reduction: bool = False

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"):
            require_positive(name, getattr(self, name))
        if self.num_qo_heads % self.num_kv_heads:
            raise InvalidArgument(
                "num_qo_heads",
                expected=f"a multiple of num_kv_heads ({self.num_kv_heads})",
                found=self.num_qo_heads,
            )
        self._check_dtypes()
        require_integer("window_left", self.window_left, at_least=-1)
        require_finite("logits_soft_cap", self.logits_soft_cap, at_least=0.0)
        if self.sm_scale is not None:
            require_scale("sm_scale", self.sm_scale)
        require_scale("rope_scale", self.rope_scale)
        require_scale("rope_theta", self.rope_theta)
        if self.f16_qk_reduction and self.dtype_q != "f16":
            raise InvalidArgument(
                "f16_qk_reduction",
                expected="False unless the queries are f16",
                found=f"{self.dtype_q} queries",
            )
        if self.mask is MaskMode.MULTI_ITEM and self.window_left >= 0:
            raise InvalidArgument(
                "window_left", expected="-1 with the multi-item mask", found=self.window_left
            )

    def _check_dtypes(self) -> None:
        if self.dtype_q not in HALVES and self.dtype_q not in FP8:
            raise InvalidArgument("dtype_q", expected="f16, bf16, e4m3 or e5m2", found=self.dtype_q)
        if self.dtype_q in FP8:
            if self.dtype_kv != self.dtype_q:
                raise InvalidArgument(
                    "dtype_kv", expected=f"{self.dtype_q}, that of the queries", found=self.dtype_kv
                )
            if self.dtype_o not in HALVES:
                raise InvalidArgument("dtype_o", expected="f16 or bf16", found=self.dtype_o)
            if self.logits_soft_cap:
                raise InvalidArgument(
                    "logits_soft_cap", expected="0.0 with FP8 queries", found=self.logits_soft_cap
                )
            return
        if self.dtype_kv != self.dtype_q and self.dtype_kv not in FP8:
            raise InvalidArgument("dtype_kv", expected=f"{self.dtype_q}, e4m3 or e5m2", found=self.dtype_kv)
        if self.dtype_o != self.dtype_q:
            raise InvalidArgument(
                "dtype_o", expected=f"{self.dtype_q}, that of the queries", found=self.dtype_o
            )

    @property
    def scale(self) -> float:
        """The factor of the logits before the soft cap and the softmax."""
        return float(self.sm_scale) if self.sm_scale is not None else 1.0 / math.sqrt(self.head_dim_qk)

    @property
    def rope_rcp_scale(self) -> float:
        """1/rope_scale, as the kernels take it."""
        return 1.0 / self.rope_scale

    @property
    def rope_rcp_theta(self) -> float:
        """1/rope_theta, as the kernels take it."""
        return 1.0 / self.rope_theta

    @property
    def group_size(self) -> int:
        """Query heads to one key head."""
        return self.num_qo_heads // self.num_kv_heads


def fa3_refusal(attention: Attention, *, sm: Sm | None) -> tuple[str, str, object] | None:
    """Say why FlashAttention 3 cannot compute this: argument, what it needs, what was found; None if it can.

    The rules are determine_attention_backend's (flashinfer/utils.py), and the head dimensions its kernels
    have; FP8 keys need FP8 queries, which 0.7 asks for and 0.6 lets fail.
    """
    if sm is None or (sm.major, sm.minor) != (9, 0):
        return "backend", "fa2 on any GPU but sm90", str(sm or "no known GPU")
    if attention.mask is MaskMode.CUSTOM:
        return "mask", "no custom mask with fa3", attention.mask.name
    if attention.pos_encoding is not PosEncoding.NONE:
        return "pos_encoding", "NONE with fa3", attention.pos_encoding.name
    if attention.f16_qk_reduction:
        return "f16_qk_reduction", "False with fa3", True
    if attention.dtype_kv in FP8 and attention.dtype_q not in FP8:
        return "dtype_kv", "fa3 reads FP8 keys with FP8 queries alone", attention.dtype_kv
    if attention.dtype_q in FP8 and attention.mask is MaskMode.MULTI_ITEM:
        return "mask", "NONE or CAUSAL with FP8 queries", attention.mask.name
    dims = (attention.head_dim_qk, attention.head_dim_vo)
    if attention.dtype_q in FP8 and dims[0] != dims[1]:
        return "head_dim_vo", f"{dims[0]}, head_dim_qk, with FP8 queries", dims[1]
    if dims not in FA3_HEAD_DIMS:
        return "head_dim_qk", "64, 128 or 256 (or 192 with head_dim_vo 128) with fa3", dims
    return None


def choose_backend(attention: Attention, wanted: Backend, *, sm: Sm | None) -> Backend:
    """Return FA2 or FA3. `auto` is FlashInfer's choice; one that cannot compute this is refused.

    Raise InvalidArgument.
    """
    refusal = fa3_refusal(attention, sm=sm)
    if wanted is Backend.FA3 and refusal is not None:
        raise InvalidArgument(refusal[0], expected=refusal[1], found=refusal[2])
    backend = Backend.FA3 if refusal is None and wanted is not Backend.FA2 else Backend.FA2
    if backend is Backend.FA2 and attention.dtype_q in FP8:
        why = "" if refusal is None else f" ({refusal[0]}: {refusal[1]}; found {refusal[2]})"
        raise InvalidArgument(
            "dtype_q", expected=f"f16 or bf16; FP8 queries need fa3{why}", found=attention.dtype_q
        )
    return backend


def require_integer(name: str, value: object, *, at_least: int | None = None) -> None:
    """Raise InvalidArgument unless `value` is an integer, and no smaller than `at_least`."""
    wanted = "an integer" if at_least is None else f"an integer of at least {at_least}"
    if isinstance(value, bool) or not isinstance(value, int) or (at_least is not None and value < at_least):
        raise InvalidArgument(name, expected=wanted, found=value)


def require_positive(name: str, value: object) -> None:
    """Raise InvalidArgument unless `value` is an integer above zero."""
    require_integer(name, value, at_least=1)


def require_finite(name: str, value: object, *, at_least: float | None = None) -> None:
    """Raise InvalidArgument unless `value` is a finite number, and no smaller than `at_least`."""
    wanted = "a finite number" if at_least is None else f"a finite number of at least {at_least}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidArgument(name, expected=wanted, found=value)
    if at_least is not None and value < at_least:
        raise InvalidArgument(name, expected=wanted, found=value)


def require_scale(name: str, value: object) -> None:
    """Raise InvalidArgument unless `value` is a finite number above zero."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise InvalidArgument(name, expected="a finite number above zero", found=value)
