"""The query parameters that several operations share, read once."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from kernel_depot.platform import Arch, CudaTag, Platform, Sm

_CUDA = Query(description="A CUDA version: `cu130`, `13.0` or `130`.", max_length=20, examples=["cu130"])
_ARCH = Query(
    description="A CPU architecture: `x86_64`, `amd64`, `aarch64` or `arm64`.",
    max_length=20,
    examples=["x86_64"],
)
_SM = Query(
    description="A GPU's compute capability: `sm90a`, `9.0a` or `90a`.", max_length=20, examples=["sm90a"]
)
CudaText = Annotated[str, _CUDA]
CudaFilter = Annotated[str | None, _CUDA]
ArchText = Annotated[str, _ARCH]
ArchFilter = Annotated[str | None, _ARCH]
SmText = Annotated[str | None, _SM]


def platform_of(cuda: str, arch: str, sm: str | None) -> Platform:
    """Read a platform. Raise PlatformError for words that cannot be read."""
    return Platform(CudaTag.parse(cuda), Arch.parse(arch), Sm.parse(sm) if sm is not None else None)


def names(values: list[str] | None) -> list[str] | None:
    """Read names given comma-separated, repeated, or both; None when none are given."""
    if values is None:
        return None
    found = dict.fromkeys(name.strip() for value in values for name in value.split(","))
    found.pop("", None)
    return list(found) or None
