"""Where a case's tensors lie: seeded inputs with their exact values, and outputs that start as NaN.

No array framework is needed: memory is the CUDA runtime's, or the CPU's (kernels.memory).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernel_depot.kernels.memory import Device, Memory
from kernel_depot.kernels.runtime import Runtime
from kernel_depot.kernels.workspaces import Workspace
from kernel_depot.smoke.numerics.formats import POISON, Reals, decode, encode, storage

FENCE: Final = 256
"""Poisoned bytes before and behind an output, which nothing may write to."""


@dataclass(frozen=True)
class Operand:
    """An input: the tensor, its bits on the host, and what they mean."""

    tensor: Any
    bits: NDArray[Any]
    exact: Reals


class Output:
    """A tensor for a kernel to write to. It holds NaN, and lies between two fences."""

    def __init__(
        self, device: Device, dtype: str, shape: Sequence[int], *, bits: NDArray[Any] | None
    ) -> None:
        self.dtype = dtype
        self.shape = tuple(shape)
        self._size = math.prod(shape) * storage(dtype).itemsize
        self._memory = Memory(self._size + 2 * FENCE, device)
        self._memory.write(bytes([POISON]) * (self._size + 2 * FENCE))
        if bits is not None:
            self._memory.write(np.ascontiguousarray(bits).tobytes(), offset=FENCE)
        self.tensor = self._memory.tensor(dtype, self.shape, offset=FENCE)

    def bits(self) -> NDArray[Any]:
        """Return what it holds now, in the format's bits. Waits for the default stream."""
        data = self._memory.read(self._size, offset=FENCE)
        return np.frombuffer(data, storage(self.dtype)).reshape(self.shape)

    def values(self) -> Reals:
        """Return what it holds now."""
        return decode(self.dtype, self.bits())

    def trespassed(self) -> int:
        """Count the bytes of the fences that were written to."""
        fences = self._memory.read(FENCE), self._memory.read(FENCE, offset=FENCE + self._size)
        return sum(byte != POISON for fence in fences for byte in fence)


class Bench:
    """One case's tensors on one device; they go with it. The same seed gives the same bits."""

    def __init__(self, runtime: Runtime, device: Device, *, seed: int, workspaces: Workspaces) -> None:
        self.runtime = runtime
        self.device = device
        self.random = np.random.default_rng(seed)
        self._workspaces = workspaces
        self._held: list[Memory] = []

    @property
    def workspace(self) -> Workspace:
        """Scratch for plans, one for all cases of a device."""
        return self._workspaces.of(self.device)

    def normal(self, dtype: str, *shape: int, scale: float = 1.0) -> Operand:
        """Return normally distributed numbers with standard deviation `scale`."""
        return self.operand(dtype, self.random.standard_normal(shape) * scale)

    def uniform(self, dtype: str, *shape: int, low: float = 0.0, high: float = 1.0) -> Operand:
        """Return evenly distributed numbers."""
        return self.operand(dtype, self.random.uniform(low, high, shape))

    def operand(self, dtype: str, values: Any) -> Operand:
        """Return numbers as a format holds them."""
        bits = encode(dtype, values)
        return Operand(self.place(dtype, bits), bits, decode(dtype, bits))

    def place(self, dtype: str, bits: NDArray[Any]) -> Any:
        """Return a tensor with these bits."""
        bits = np.ascontiguousarray(bits, storage(dtype))
        memory = Memory(max(bits.nbytes, 1), self.device)
        if bits.nbytes:
            memory.write(bits.tobytes())
        self._held.append(memory)
        return memory.tensor(dtype, bits.shape)

    def output(self, dtype: str, *shape: int, bits: NDArray[Any] | None = None) -> Output:
        """Return a tensor to write to, full of NaN or of `bits`."""
        return Output(self.device, dtype, shape, bits=bits)


class Workspaces:
    """The scratch of each device, made when first asked for."""

    def __init__(self) -> None:
        self._made: dict[Device, Workspace] = {}

    def of(self, device: Device) -> Workspace:
        """Return a device's. Raise CudaCallFailed when it has no memory left."""
        if device not in self._made:
            self._made[device] = Workspace(device)
        return self._made[device]
