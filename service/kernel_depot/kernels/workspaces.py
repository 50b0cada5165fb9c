"""What planned attention works in: scratch on the device, and the pinned memory plans are made in.

A plan is written into pinned memory and copied to the device on the caller's stream. Until that copy is done
the pinned memory must stay as it is, so a workspace keeps a few of them and takes one whose copy is done.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import ALIGNMENT, Device, Event, Memory, cuda_runtime

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FLOAT_BYTES: Final = 128 << 20
"""The device scratch that FlashInfer recommends for split keys (flashinfer/prefill.py)."""

INT_BYTES: Final = 8 << 20
"""The room for a plan that FlashInfer takes (flashinfer/prefill.py, mla.py)."""

INDEX_BYTES: Final = 1 << 20
"""The room for a plan's index arrays: about 87,000 requests of a paged plan."""

PINNED_SLOTS: Final = 4
"""How many plans may be under way to the device before making one more waits for the first."""


SCRATCH_BYTES: Final = 32 << 20
"""The scratch that FlashInfer gives single requests (flashinfer/prefill.py, decode.py)."""

_scratch: dict[tuple[Device, int], Memory] = {}
_scratch_lock = threading.Lock()


def scratch(device: Device, *, stream: int) -> Any:
    """Return scratch [32 MiB] of a device, one for each stream, so that no two launches share it at a time.

    Raise CudaCallFailed when the device has no memory left.
    """
    with _scratch_lock:
        memory = _scratch.get((device, stream))
        if memory is None:
            memory = _scratch[device, stream] = Memory(SCRATCH_BYTES, device)
    return memory.tensor("u8", (SCRATCH_BYTES,))


class Workspace:
    """The scratch of one plan at a time, on one device. Not for two threads at once.

    `float_bytes` and `int_bytes` are sizes in bytes. A plan made in a workspace replaces the one before it:
    the former then refuses to run. Raise CudaCallFailed when the device has no memory left, InvalidArgument
    for sizes below one byte.
    """

    def __init__(
        self,
        device: Device,
        *,
        float_bytes: int = FLOAT_BYTES,
        int_bytes: int = INT_BYTES,
        index_bytes: int = INDEX_BYTES,
    ) -> None:
        sizes = {"float_bytes": float_bytes, "int_bytes": int_bytes, "index_bytes": index_bytes}
        for name, size in sizes.items():
            if size < 1:
                raise InvalidArgument(name, expected="at least one byte", found=size)
        self.device = device
        self.int_bytes = int_bytes
        self.index_bytes = index_bytes
        self.generation = 0
        self._float_memory = Memory(float_bytes, device)
        self._int_memory = Memory(_aligned(int_bytes) + index_bytes, device)
        self.float_buffer = self._float_memory.tensor("u8", (float_bytes,))
        self.int_buffer = self._int_memory.tensor("u8", (int_bytes,))
        self._slots: list[_Slot] = []
        self._next = 0

    @contextmanager
    def planning(self, *, stream: int) -> Iterator[Staging]:
        """Lend pinned memory for one plan whose copies go on `stream`; what was planned before is void."""
        self.generation += 1
        slot = self._free_slot()
        staging = Staging(self, slot.memory, stream=stream)
        try:
            yield staging
        finally:
            slot.used_until(stream)

    def _free_slot(self) -> _Slot:
        for slot in self._slots:
            if slot.is_free():
                return slot
        if len(self._slots) < PINNED_SLOTS:
            self._slots.append(_Slot(self.device, _aligned(self.int_bytes) + self.index_bytes))
            return self._slots[-1]
        self._next = (self._next + 1) % PINNED_SLOTS
        self._slots[self._next].wait()
        return self._slots[self._next]

    def _index_tensor(self, length: int, *, offset: int) -> Any:
        return self._int_memory.tensor("i32", (length,), offset=_aligned(self.int_bytes) + offset)

    def _copy(self, source: Memory, *, offset: int, size: int, stream: int) -> None:
        """Bring bytes from pinned memory to the same place on the device."""
        target = self._int_memory.address + offset
        if self.device.is_cuda:
            with cuda_runtime().on_device(self.device.id):
                cuda_runtime().copy_to_device(target, source.address + offset, size, stream=stream)
        else:
            self._int_memory.write(source.read(size, offset=offset), offset=offset)


def plan_void(planned: object | None) -> InvalidArgument:
    """Return what to raise for a run without a plan, or after another plan in the same workspace."""
    return InvalidArgument(
        "plan",
        expected="a plan that is the last one made in its workspace",
        found="no plan" if planned is None else "a later plan of another owner",
        remedy="call plan() before run(), and give every plan in use a workspace of its own",
    )


class Staging:
    """Pinned memory lent for one plan, and the copies from it to the device."""

    def __init__(self, workspace: Workspace, memory: Memory, *, stream: int) -> None:
        self._workspace = workspace
        self._memory = memory
        self._stream = stream
        self.pinned_buffer = memory.tensor("u8", (workspace.int_bytes,))

    def index_arrays(self, arrays: Sequence[NDArray[np.int32]]) -> list[Any]:
        """Bring index arrays to the device; return them there.

        Raise InvalidArgument when they need more room.
        """
        need = sum(_aligned(array.nbytes) for array in arrays)
        if need > self._workspace.index_bytes:
            raise InvalidArgument(
                "workspace", expected=f"index_bytes of at least {need}", found=self._workspace.index_bytes
            )
        start = _aligned(self._workspace.int_bytes)
        tensors, offset = [], 0
        for array in arrays:
            self._memory.write(array.tobytes(), offset=start + offset)
            tensors.append(self._workspace._index_tensor(array.size, offset=offset))
            offset += _aligned(array.nbytes)
        if offset:
            self._workspace._copy(self._memory, offset=start, size=offset, stream=self._stream)
        return tensors

    def copy_plan(self, size: int) -> None:
        """Bring the plan's first `size` bytes to the device, for planners that leave it to their caller."""
        if size:
            self._workspace._copy(self._memory, offset=0, size=size, stream=self._stream)


class _Slot:
    """A piece of pinned memory, and the event after the last copy out of it."""

    def __init__(self, device: Device, size: int) -> None:
        self.memory = Memory(size, device, pinned=True)
        self._event = Event(device) if device.is_cuda else None

    def is_free(self) -> bool:
        return self._event is None or self._event.reached()

    def used_until(self, stream: int) -> None:
        if self._event is not None:
            self._event.record(stream)

    def wait(self) -> None:
        if self._event is not None:
            self._event.wait()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
