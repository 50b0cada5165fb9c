"""Which stream a call goes on, with stand-ins for frameworks and for their streams."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import tvm_ffi

from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import CPU, CUDA, Device
from kernel_depot.kernels.streams import current_stream, on_stream, stream_handle

GPU = Device(CUDA, 1)


def raw(device: Device) -> int:
    return int(tvm_ffi.get_raw_stream(tvm_ffi.device("cuda" if device.is_cuda else "cpu", device.id)))


@pytest.fixture
def frameworks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put stand-ins in the place of torch and cupy; None hides one that is installed."""

    def put(torch: Any = None, cupy: Any = None) -> None:
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setitem(sys.modules, "cupy", cupy)

    return put


def torch_on(stream: int, *, initialized: bool = True) -> Any:
    asked: list[int] = []

    def current(device: int) -> Any:
        asked.append(device)
        return SimpleNamespace(cuda_stream=stream)

    cuda = SimpleNamespace(is_initialized=lambda: initialized, current_stream=current)
    return SimpleNamespace(cuda=cuda, asked=asked)


def cupy_on(stream: int) -> Any:
    return SimpleNamespace(
        cuda=SimpleNamespace(get_current_stream=lambda device: SimpleNamespace(ptr=stream))
    )


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (1 << 47, 1 << 47),
        (SimpleNamespace(cuda_stream=5), 5),
        (SimpleNamespace(ptr=6), 6),
        (SimpleNamespace(handle=7), 7),
        (SimpleNamespace(cuda_stream=0), 0),
    ],
)
def test_a_stream_is_a_number_or_an_object_that_has_one(stream: object, handle: int) -> None:
    assert stream_handle(stream) == handle


@pytest.mark.parametrize("stream", [True, "5", 5.0, None, object(), SimpleNamespace(ptr=None)])
def test_what_is_no_stream_is_refused(stream: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        stream_handle(stream)
    assert caught.value.name == "stream"


def test_torchs_current_stream_of_that_device_comes_first(frameworks: Any) -> None:
    torch = torch_on(11)
    frameworks(torch, cupy_on(22))
    assert current_stream(GPU) == 11
    assert torch.asked == [1]


def test_a_torch_that_has_not_used_the_gpu_is_not_asked(frameworks: Any) -> None:
    torch = torch_on(11, initialized=False)
    frameworks(torch, cupy_on(22))
    assert current_stream(GPU) == 22
    assert torch.asked == []


def test_without_a_framework_it_is_tvm_ffis(frameworks: Any) -> None:
    frameworks()
    assert current_stream(GPU) == 0
    with on_stream(GPU, 33):
        assert current_stream(GPU) == 33
        assert current_stream(Device(CUDA, 0)) == 0
    assert current_stream(GPU) == 0


def test_the_host_has_no_stream(frameworks: Any) -> None:
    torch = torch_on(11)
    frameworks(torch)
    assert current_stream(Device(CPU)) == 0
    assert torch.asked == []


def test_the_context_is_restored_also_after_a_failure() -> None:
    with on_stream(GPU, 44):
        with pytest.raises(KeyError), on_stream(GPU, 55):
            assert raw(GPU) == 55
            raise KeyError
        assert raw(GPU) == 44
    assert raw(GPU) == 0
