"""What plans are made in: pinned memory, the way to the device, and which plan is the last."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import CPU, Device
from kernel_depot.kernels.workspaces import SCRATCH_BYTES, Workspace, scratch

HOST = Device(CPU)


def small() -> Workspace:
    return Workspace(HOST, float_bytes=4096, int_bytes=1000, index_bytes=2048)


@pytest.mark.parametrize("name", ["float_bytes", "int_bytes", "index_bytes"])
@pytest.mark.parametrize("size", [0, -1])
def test_a_workspace_of_no_size_is_refused(name: str, size: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Workspace(HOST, **{name: size})
    assert caught.value.name == name


def test_index_arrays_come_to_the_device_side_by_side() -> None:
    workspace = small()
    arrays = [np.arange(5, dtype=np.int32), np.zeros(0, np.int32), np.array([7, -1], np.int32)]
    with workspace.planning(stream=0) as staging:
        placed = staging.index_arrays(arrays)
    for tensor, array in zip(placed, arrays, strict=True):
        assert tuple(tensor.shape) == array.shape
        assert np.from_dlpack(tensor).tolist() == array.tolist()


def test_index_arrays_too_large_are_refused_with_the_room_they_need() -> None:
    workspace = small()
    with workspace.planning(stream=0) as staging, pytest.raises(InvalidArgument) as caught:
        staging.index_arrays([np.zeros(512, np.int32), np.zeros(1, np.int32)])
    assert (caught.value.expected, caught.value.found) == ("index_bytes of at least 2304", 2048)


def test_the_pinned_buffer_is_as_long_as_the_devices() -> None:
    workspace = small()
    with workspace.planning(stream=0) as staging:
        assert tuple(staging.pinned_buffer.shape) == (1000,)
    assert tuple(workspace.float_buffer.shape) == (4096,)


def test_every_planning_voids_the_one_before_also_one_that_failed() -> None:
    workspace = small()
    seen = [workspace.generation]
    with workspace.planning(stream=0):
        seen.append(workspace.generation)
    with pytest.raises(RuntimeError, match="planner"), workspace.planning(stream=0):
        seen.append(workspace.generation)
        raise RuntimeError("the planner failed")
    assert len(set(seen)) == 3
    with workspace.planning(stream=0) as staging:
        (placed,) = staging.index_arrays([np.array([3], np.int32)])
    assert np.from_dlpack(placed).tolist() == [3]


def test_scratch_is_one_for_each_stream() -> None:
    first, again, other = (scratch(HOST, stream=stream) for stream in (0, 0, 8))
    assert tuple(first.shape) == (SCRATCH_BYTES,)
    assert first.data_ptr() == again.data_ptr()
    assert first.data_ptr() != other.data_ptr()
