"""What is read of tensors, and what is refused; with numpy's and with tensors that need no framework."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm_ffi

from kernel_depot.kernels import tensors
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import CPU, CUDA, Device
from kernel_depot.kernels.tensors import Tensor, is_on, owned, read_optional, read_tensor

HOST = Device(CPU)
NAMES = {
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "bool": np.bool_,
}  # fmt: skip


def made(*shape: int, strides: tuple[int, ...] | None = None, **facts: Any) -> Tensor:
    """Facts of a tensor that is nowhere, contiguous unless strides are given."""
    dense = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    return Tensor(
        facts.get("name", "x"),
        facts.get("value"),
        facts.get("dtype", "f16"),
        shape,
        dense if strides is None else strides,
        facts.get("device", HOST),
    )


@pytest.mark.parametrize("name", NAMES)
def test_numpys_arrays_are_read_by_dlpack(name: str) -> None:
    array = np.zeros((2, 3, 4), NAMES[name])
    found = read_tensor("x", array)
    assert (found.dtype, found.shape, found.strides, found.device) == (name, (2, 3, 4), (12, 4, 1), HOST)
    assert isinstance(found.value, tvm_ffi.Tensor)
    assert found.value.data_ptr() == array.ctypes.data
    assert found.form == f"{name} [2, 3, 4]"


@pytest.mark.parametrize("dtype", ["bf16", "e4m3", "e5m2"])
def test_dtypes_that_numpy_lacks_are_read_too(tensor: Any, dtype: str) -> None:
    found = read_tensor("x", tensor(dtype, 3, 5))
    assert (found.dtype, found.shape, found.strides) == (dtype, (3, 5), (5, 1))


def test_strides_count_elements() -> None:
    found = read_tensor("x", np.zeros((4, 8), np.float32)[:, ::2])
    assert (found.shape, found.strides, found.is_contiguous) == ((4, 4), (8, 2), False)


def test_what_is_no_tensor_is_refused_with_its_name() -> None:
    for value in (None, [1.0], 3, "text", object()):
        with pytest.raises(InvalidArgument, match="speaks DLPack") as caught:
            read_tensor("weight", value)
        assert caught.value.name == "weight"


def test_a_dtype_that_no_kernel_knows_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="dtype that kernels know"):
        read_tensor("x", np.zeros(2, np.complex64))


def test_none_is_none_only_where_it_may_be() -> None:
    assert read_optional("x", None) is None
    found = read_optional("x", np.zeros(2, np.float16))
    assert found is not None
    assert found.dtype == "f16"


class FakeTorchTensor:
    """As much of torch's tensor as is read."""

    def __init__(self, device: Any, dtype: str) -> None:
        self.device = device
        self.dtype = dtype
        self.shape = (2, 6)

    def stride(self) -> tuple[int, ...]:
        return (6, 1)


@pytest.fixture
def torch_tensor(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=FakeTorchTensor))
    tensors._torch_dtype.cache_clear()

    def make(kind: str, index: int | None, dtype: str) -> FakeTorchTensor:
        return FakeTorchTensor(SimpleNamespace(type=kind, index=index), dtype)

    return make


@pytest.mark.parametrize(
    ("kind", "index", "device"),
    [("cuda", 3, Device(CUDA, 3)), ("cuda", None, Device(CUDA, 0)), ("cpu", None, HOST)],
)
def test_torchs_are_read_by_their_attributes(
    torch_tensor: Any, kind: str, index: int | None, device: Device
) -> None:
    value = torch_tensor(kind, index, "torch.float8_e4m3fn")
    found = read_tensor("x", value)
    assert (found.dtype, found.shape, found.strides, found.device) == ("e4m3", (2, 6), (6, 1), device)
    assert found.value is value


def test_torchs_elsewhere_or_of_another_dtype_are_refused(torch_tensor: Any) -> None:
    with pytest.raises(InvalidArgument, match="CUDA device"):
        read_tensor("x", torch_tensor("meta", None, "torch.float16"))
    with pytest.raises(InvalidArgument, match="complex64"):
        read_tensor("x", torch_tensor("cpu", None, "torch.complex64"))


def test_owning_takes_no_copy_and_lets_gradients_go() -> None:
    array = np.zeros(4, np.float32)
    first = owned(array)
    assert owned(first) is first
    assert first.data_ptr() == array.ctypes.data
    detached = SimpleNamespace(requires_grad=True, detach=lambda: array)
    assert owned(detached).data_ptr() == array.ctypes.data


def test_where_a_value_lies() -> None:
    assert is_on(np.zeros(1), HOST)
    assert not is_on(np.zeros(1), Device(CUDA, 0))
    assert not is_on([1, 2], HOST)
    assert is_on(SimpleNamespace(__dlpack_device__=lambda: (2, 1)), Device(CUDA, 1))


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (1, 2), False),
        ((1, 3), (99, 1), True),
        ((2, 1), (1, 7), True),
        ((), (), True),
    ],
)
def test_a_dimension_of_one_may_have_any_stride(
    shape: tuple[int, ...], strides: tuple[int, ...], dense: bool
) -> None:
    one = made(*shape, strides=strides)
    assert one.is_contiguous is dense
    if dense:
        tensors.require_contiguous(one)
    else:
        with pytest.raises(InvalidArgument, match="strides"):
            tensors.require_contiguous(one)


def test_each_rule_names_the_argument_and_lets_the_right_pass() -> None:
    good = made(4, 8)
    tensors.require_dtype(good, "bf16", "f16")
    tensors.require_rank(good, 2, 3)
    tensors.require_filled(good)
    tensors.require_shape(good, (None, 8), why="rows of 8")
    tensors.require_dense_rows(made(4, 8, strides=(16, 1)))
    tensors.require_dense_rows(made(4, 1, strides=(16, 5)))
    tensors.require_same_dtype(good, made(1))
    wrong = made(4, 0, name="bad", strides=(0, 2))
    for rule in (
        lambda: tensors.require_dtype(wrong, "bf16"),
        lambda: tensors.require_rank(wrong, 1, 3),
        lambda: tensors.require_filled(wrong),
        lambda: tensors.require_shape(wrong, (4, 8), why="as x"),
        lambda: tensors.require_shape(wrong, (4,), why="as x"),
        lambda: tensors.require_dense_rows(wrong),
        lambda: tensors.require_same_dtype(made(1, dtype="f32"), made(1), wrong),
    ):
        with pytest.raises(InvalidArgument) as caught:
            rule()
        assert caught.value.name in ("bad", "x")
        assert caught.value.expected is not None
        assert caught.value.found is not None


def test_alignment_is_that_of_the_first_byte() -> None:
    at = SimpleNamespace(data_ptr=lambda: 0x1008)
    tensors.require_aligned(made(1, value=at), 8)
    with pytest.raises(InvalidArgument, match="divisible by 16") as caught:
        tensors.require_aligned(made(1, value=at), 16)
    assert caught.value.found == "0x1008"


def test_all_lie_where_the_first_does() -> None:
    here, there = made(1, name="a"), made(1, name="b", device=Device(CUDA, 0))
    assert tensors.require_same_device([here, None, made(2)]) == HOST
    with pytest.raises(InvalidArgument, match="where a is") as caught:
        tensors.require_same_device([here, None, there])
    assert caught.value.name == "b"


def test_a_test_for_likeness_needs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert tensors.fingerprint(np.zeros(1)) is None
    assert tensors.alike(np.zeros(1)) is None
