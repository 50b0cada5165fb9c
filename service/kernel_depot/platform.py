"""What a node is: CUDA tag, CPU arch, SM and glibc; read from every spelling people use."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import total_ordering
from typing import Any

from kernel_depot.errors import DepotError


class PlatformError(DepotError):
    """A platform word that cannot be read."""

    slug = "platform-invalid"
    title = "Not a platform"
    status = 400


_CUDA = re.compile(
    r"(?:cu|cuda)?\s*(?:(?P<dotmajor>\d{1,2})\.(?P<dotminor>\d)|(?P<major>\d{2})(?P<minor>\d))"
)
_SM = re.compile(
    r"(?:sm_?|compute_?)?"
    r"(?:(?P<dotmajor>\d{1,2})\.(?P<dotminor>\d)|(?P<major>\d{1,2})(?P<minor>\d))(?P<suffix>[af]?)"
)


@total_ordering
@dataclass(frozen=True, slots=True)
class CudaTag:
    """A CUDA major and minor version, written `cu130`."""

    major: int
    minor: int

    @classmethod
    def parse(cls, text: str) -> CudaTag:
        """Read `cu130`, `13.0` or `130`. Raise PlatformError for anything else."""
        match = _CUDA.fullmatch(text.strip().lower())
        if match is None:
            raise PlatformError(f"{text!r} is not a CUDA version", expected="cu130, 13.0 or 130", found=text)
        return cls(int(match["dotmajor"] or match["major"]), int(match["dotminor"] or match["minor"]))

    def __str__(self) -> str:
        return f"cu{self.major}{self.minor}"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, CudaTag):
            return NotImplemented
        return (self.major, self.minor) < (other.major, other.minor)


class Arch(str, Enum):
    """A CPU architecture, by the name `uname -m` prints."""

    X86_64 = "x86_64"
    AARCH64 = "aarch64"

    @classmethod
    def parse(cls, text: str) -> Arch:
        """Read `x86_64`, `amd64`, `aarch64` or `arm64`. Raise PlatformError for anything else."""
        known = {"x86_64": cls.X86_64, "amd64": cls.X86_64, "aarch64": cls.AARCH64, "arm64": cls.AARCH64}
        try:
            return known[text.strip().lower()]
        except KeyError:
            raise PlatformError(
                f"{text!r} is not a CPU architecture", expected=", ".join(known), found=text
            ) from None

    def __str__(self) -> str:
        return self.value


@total_ordering
@dataclass(frozen=True, slots=True)
class Sm:
    """A GPU's compute capability, written `sm90a`; `a` is arch-specific code, `f` family code."""

    major: int
    minor: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> Sm:
        """Read `sm90a`, `sm_90a`, `9.0a` or `90a`. Raise PlatformError for anything else."""
        match = _SM.fullmatch(text.strip().lower())
        if match is None:
            raise PlatformError(f"{text!r} is not an SM", expected="sm90a, sm_90a, 9.0a or 90a", found=text)
        return cls(
            int(match["dotmajor"] or match["major"]),
            int(match["dotminor"] or match["minor"]),
            match["suffix"],
        )

    def __str__(self) -> str:
        return f"sm{self.major}{self.minor}{self.suffix}"

    @property
    def target(self) -> str:
        """The name NVIDIA's tools print: `sm_90a`."""
        return f"sm_{self.major}{self.minor}{self.suffix}"

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order code targets from general to specific: by capability, then plain, family, arch-specific."""
        return (self.major, self.minor, ("", "f", "a").index(self.suffix))

    def runs(self, code: Sm) -> bool:
        """Tell whether machine code built for `code` runs on this GPU.

        Plain code runs on the same major at the same or a later minor; `f` code likewise;
        `a` code only on the very same capability (CUDA C++ Programming Guide, compute capabilities).
        """
        if self.major != code.major:
            return False
        if code.suffix == "a":
            return self.minor == code.minor
        return self.minor >= code.minor

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Sm):
            return NotImplemented
        return (self.major, self.minor, self.suffix) < (other.major, other.minor, other.suffix)


def has_code_for(node: Sm, *, sms: Iterable[str], ptx: Iterable[str]) -> bool:
    """Tell whether a module with machine code for `sms` and PTX for `ptx` can run on `node`.

    PTX is compiled forward by the driver, except arch-specific (`a`) and family (`f`) PTX.
    """
    if any(node.runs(Sm.parse(text)) for text in sms):
        return True
    for text in ptx:
        virtual = Sm.parse(text)
        if virtual.suffix and node.runs(virtual):
            return True
        if not virtual.suffix and (node.major, node.minor) >= (virtual.major, virtual.minor):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Platform:
    """What wheels are matched against; `sm` None means no GPU is known."""

    cuda: CudaTag
    arch: Arch
    sm: Sm | None = None

    def __str__(self) -> str:
        return f"{self.cuda} {self.arch}" + (f" {self.sm}" if self.sm else "")

    def to_json(self) -> dict[str, Any]:
        """Return the canonical JSON members."""
        return {"arch": str(self.arch), "cuda": str(self.cuda), "sm": str(self.sm) if self.sm else None}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Platform:
        """Read what `to_json` wrote. Raise PlatformError for unknown spellings."""
        sm = data.get("sm")
        return cls(CudaTag.parse(data["cuda"]), Arch.parse(data["arch"]), Sm.parse(sm) if sm else None)
