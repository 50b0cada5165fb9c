"""What a module's name says: the reverse of `uri`, for the families that are called here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from kernel_depot.kernels.attention import Attention, Backend, PosEncoding
from kernel_depot.kernels.uri import (
    BATCH_DECODE,
    BATCH_MLA,
    BATCH_PREFILL,
    GDN_PREFILL,
    KV_STRIDE_EQUAL,
    NORM,
    PAGE,
    PLAN_ABI_2,
    SINGLE_DECODE,
    SINGLE_PREFILL,
    SM90,
    Release,
    batch_decode_uri,
    batch_mla_uri,
    batch_prefill_uri,
    single_decode_uri,
    single_prefill_uri,
)


class Family(str, Enum):
    """A kind of kernel module that can be called here."""

    NORM = "norm"
    PAGE = "page"
    GDN_PREFILL = "gdn_prefill"
    SINGLE_PREFILL = "single_prefill"
    BATCH_PREFILL = "batch_prefill"
    SINGLE_DECODE = "single_decode"
    BATCH_DECODE = "batch_decode"
    BATCH_MLA = "batch_mla"
    FUSED_MOE = "fused_moe"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class PlainModule:
    """A module whose name has no parameters but, for fused MoE, the GPU it is for (`90`)."""

    family: Family
    name: str

    def uri(self, release: Release) -> str:  # noqa: ARG002
        """Return the name; it is the same in every release."""
        return self.name


@dataclass(frozen=True, slots=True)
class AttentionModule:
    """A prefill or decode module. Data types are spelled as in names: `f16`, `bf16`, `e4m3`."""

    family: Family
    dtype_q: str
    dtype_kv: str
    dtype_o: str
    head_dim_qk: int
    head_dim_vo: int
    pos_encoding: PosEncoding
    window: bool
    soft_cap: bool
    f16_qk_reduction: bool = False
    backend: Backend = Backend.FA2

    def attention(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        *,
        window_left: int,
        logits_soft_cap: float,
        **options: Any,
    ) -> Attention:
        """Return an attention that this module computes; window and cap count where the module has them.

        `options` are further members of Attention. Raise InvalidArgument for what kernels do not compute.
        """
        return Attention(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=self.head_dim_qk,
            head_dim_vo=self.head_dim_vo,
            dtype_q=self.dtype_q,
            dtype_kv=self.dtype_kv,
            dtype_o=self.dtype_o,
            pos_encoding=self.pos_encoding,
            window_left=window_left if self.window else -1,
            logits_soft_cap=logits_soft_cap if self.soft_cap else 0.0,
            f16_qk_reduction=self.f16_qk_reduction,
            **options,
        )

    def uri(self, release: Release) -> str:
        """Return the name in a release. Raise InvalidArgument for what kernels do not compute."""
        attention = self.attention(1, 1, window_left=1, logits_soft_cap=1.0)
        if self.family is Family.SINGLE_PREFILL:
            return single_prefill_uri(attention, self.backend)
        if self.family is Family.BATCH_PREFILL:
            return batch_prefill_uri(attention, self.backend, release)
        return {Family.SINGLE_DECODE: single_decode_uri, Family.BATCH_DECODE: batch_decode_uri}[self.family](
            attention
        )


@dataclass(frozen=True, slots=True)
class MlaModule:
    """A module of latent attention."""

    dtype_q: str
    dtype_kv: str
    dtype_o: str
    head_dim_ckv: int
    head_dim_kpe: int
    backend: Backend = Backend.FA2
    family: Family = Family.BATCH_MLA

    def uri(self, release: Release) -> str:
        """Return the name in a release."""
        return batch_mla_uri(
            dtype_q=self.dtype_q,
            dtype_kv=self.dtype_kv,
            dtype_o=self.dtype_o,
            head_dim_ckv=self.head_dim_ckv,
            head_dim_kpe=self.head_dim_kpe,
            backend=self.backend,
            release=release,
        )


ModuleParameters = PlainModule | AttentionModule | MlaModule

_PLAIN: Final = {NORM: Family.NORM, PAGE: Family.PAGE, GDN_PREFILL: Family.GDN_PREFILL}
_MOE: Final = re.compile("fused_moe_[0-9]+")
_FLAGS: Final = frozenset({"use_swa", "use_logits_cap", "f16qk", "profiler"})
_NUMBERS: Final = frozenset({"head_dim_qk", "head_dim_vo", "head_dim_ckv", "head_dim_kpe"})


def _pattern(template: str, *ends: str) -> re.Pattern[str]:
    """Return what matches the names of a template, each end there or not."""
    pieces = []
    for text, name in re.findall(r"([^{]*)(?:\{(\w+)\})?", template):
        pieces.append(re.escape(text))
        if name:
            value = (
                "True|False"
                if name in _FLAGS
                else "[1-9][0-9]*"
                if name in _NUMBERS
                else "[012]"
                if name == "posenc"
                else "i32"
                if name == "dtype_idx"
                else "f16|bf16|e4m3|e5m2"
            )
            pieces.append(f"(?P<{name}>{value})")
    return re.compile("".join(pieces) + "".join(f"(?P<end{at}>{end})?" for at, end in enumerate(ends)))


_ATTENTION: Final = {
    Family.SINGLE_PREFILL: _pattern(SINGLE_PREFILL, SM90),
    Family.BATCH_PREFILL: _pattern(BATCH_PREFILL, SM90, KV_STRIDE_EQUAL),
    Family.SINGLE_DECODE: _pattern(SINGLE_DECODE),
    Family.BATCH_DECODE: _pattern(BATCH_DECODE),
}
_MLA: Final = _pattern(BATCH_MLA, PLAN_ABI_2, SM90)


def parse_uri(uri: str) -> ModuleParameters | None:
    """Return what a module's name says; None for a name of no family that is called here.

    What comes back names `uri` again in the releases that call it so, and only there.
    """
    if uri in _PLAIN:
        return PlainModule(_PLAIN[uri], uri)
    if _MOE.fullmatch(uri):
        return PlainModule(Family.FUSED_MOE, uri)
    for family, pattern in _ATTENTION.items():
        if match := pattern.fullmatch(uri):
            parts = match.groupdict()
            return AttentionModule(
                family=family,
                dtype_q=parts["dtype_q"],
                dtype_kv=parts["dtype_kv"],
                dtype_o=parts["dtype_o"],
                head_dim_qk=int(parts["head_dim_qk"]),
                head_dim_vo=int(parts["head_dim_vo"]),
                pos_encoding=PosEncoding(int(parts["posenc"])),
                window=parts["use_swa"] == "True",
                soft_cap=parts["use_logits_cap"] == "True",
                f16_qk_reduction=parts.get("f16qk") == "True",
                backend=Backend.FA3 if parts.get("end0") else Backend.FA2,
            )
    if (match := _MLA.fullmatch(uri)) and match["profiler"] == "False":
        return MlaModule(
            dtype_q=match["dtype_q"],
            dtype_kv=match["dtype_kv"],
            dtype_o=match["dtype_o"],
            head_dim_ckv=int(match["head_dim_ckv"]),
            head_dim_kpe=int(match["head_dim_kpe"]),
            backend=Backend.FA3 if match["end1"] else Backend.FA2,
        )
    return None
