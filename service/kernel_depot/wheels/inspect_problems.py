"""What is wrong with a file out of a wheel that claims to be native code."""

from __future__ import annotations

from kernel_depot.wheels.errors import WheelError


class InspectError(WheelError):
    """Native code that cannot be what its name says."""

    slug = "inspect-failed"
    title = "The file is not the code it claims to be"


class ElfInvalid(InspectError):
    """A `.so` that is no well-formed ELF shared object."""

    slug = "elf-invalid"
    title = "Not a valid ELF shared object"


class WrongMachine(InspectError):
    """A `.so` for another CPU than the wheel's pin names."""

    slug = "wrong-machine"
    title = "The library is for another CPU architecture"


class FatbinInvalid(InspectError):
    """A fatbin section or file whose records contradict each other."""

    slug = "fatbin-invalid"
    title = "Not a valid CUDA fatbin"


class CubinInvalid(InspectError):
    """A `.cubin` that is no well-formed CUDA ELF file."""

    slug = "cubin-invalid"
    title = "Not a valid cubin"
