"""Memory as tensors: what reads them sees the right bytes, and they hold nothing back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import psutil
import pytest
import tvm_ffi

from kernel_depot.kernels.memory import ALIGNMENT, CPU, Device, Memory
from kernel_depot.kernels.tensors import read_tensor

HOST = Device(CPU)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("u8", np.uint8),
        ("u16", np.uint16),
        ("u32", np.uint32),
        ("i32", np.int32),
        ("i64", np.int64),
        ("f16", np.float16),
        ("f32", np.float32),
    ],
)
def test_a_tensor_shows_the_bytes_it_was_made_over(dtype: str, kind: Any) -> None:
    memory = Memory(1024, HOST)
    values = np.arange(24, dtype=kind).reshape(2, 3, 4)
    memory.write(values.tobytes(), offset=64)
    found = memory.tensor(dtype, (2, 3, 4), offset=64)
    assert (np.from_dlpack(found) == values).all()
    assert memory.read(values.nbytes, offset=64) == values.tobytes()


@pytest.mark.parametrize("dtype", ["u8", "u16", "u32", "i32", "i64", "f16", "bf16", "f32", "e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_every_dtype_and_shape_is_told_as_it_was_asked_for(dtype: str, shape: tuple[int, ...]) -> None:
    memory = Memory(1024, HOST)
    found = read_tensor("x", memory.tensor(dtype, shape))
    assert (found.dtype, found.shape, found.device) == (dtype, shape, HOST)
    assert found.is_contiguous


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("size", [1, 255, 4096])
def test_memory_starts_where_cuda_would(size: int, pinned: bool) -> None:
    memory = Memory(size, HOST, pinned=pinned)
    assert memory.address % ALIGNMENT == 0
    assert memory.read(size) == bytes(size)


def test_memory_goes_when_nobody_has_it() -> None:
    memory = Memory(64, HOST)
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is None


def test_tensors_leave_nothing_behind() -> None:
    memory = Memory(64, HOST)

    def make(count: int) -> int:
        for _ in range(count):
            tvm_ffi.from_dlpack(memory.tensor("i32", (2, 2, 2)))
        return int(psutil.Process().memory_info().rss)

    before = make(5_000)
    after = make(20_000)
    # A tensor's shape, strides and header take at least 96 bytes.
    assert after - before < 512 << 10, (before, after)


def test_devices_are_named() -> None:
    assert [str(Device(1)), str(Device(2, 3)), str(Device(10, 1))] == [
        "cpu",
        "cuda:3",
        "device type 10, number 1",
    ]
