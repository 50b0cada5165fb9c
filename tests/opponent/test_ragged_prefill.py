"""What a call of the opponent refuses before anything reaches a GPU, and how streams are ordered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kernel_depot.opponent as opponent
from kernel_depot.bundle import BundleGroup
from kernel_depot.kernels.attention import Attention, Backend
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.memory import CPU, CUDA, Device, Memory
from kernel_depot.kernels.tensors import Tensor, read_tensor
from kernel_depot.kernels.uri import batch_prefill_uri
from kernel_depot.opponent import ragged_prefill
from kernel_depot.opponent.ragged_prefill import ragged_prefill_bf16_hd128, ragged_prefill_bf16_hd256

URI = batch_prefill_uri(Attention(4, 4, 128, 128, "bf16", "bf16", "bf16"), Backend.FA2, (0, 6, 3))
HOST, GPU = Device(CPU), Device(CUDA, 0)
Call = Callable[..., Any]


@pytest.fixture
def tensor() -> Call:
    """Make host tensors, whose memory lives as long as the test."""
    held = []

    def make(dtype: str, *shape: int) -> Any:
        held.append(Memory(1 << 16, HOST))
        return held[-1].tensor(dtype, shape)

    return make


@pytest.fixture
def call(synced: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tensor: Call) -> Call:
    """Call the opponent with arguments that are right but for those given; all of it lies on the host."""
    monkeypatch.setenv(opponent.SWITCH, "1")
    cache = synced([URI], BundleGroup("opponent", (URI,)))

    def given(dim: int = 128, **other: Any) -> Any:
        function = {128: ragged_prefill_bf16_hd128, 256: ragged_prefill_bf16_hd256}[dim]
        arguments = {
            "q": tensor("bf16", 4, 8, dim),
            "k": tensor("bf16", 6, 2, dim),
            "v": tensor("bf16", 6, 2, dim),
            "qo_indptr": [0, 1, 4],
            "kv_indptr": [0, 3, 6],
            "out": tensor("bf16", 4, 8, dim),
            "causal": False,
            **other,
        }
        return function(**arguments, cache=cache)

    return given


@pytest.mark.parametrize("dim", [128, 256])
def test_all_is_right_but_the_device(call: Call, dim: int) -> None:
    with pytest.raises(InvalidArgument, match="CUDA device") as caught:
        call(dim)
    assert caught.value.name == "q"


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_tensor_of_another_dtype_is_refused_by_name(call: Call, tensor: Call, name: str) -> None:
    rows, heads = (4, 8) if name in ("q", "out") else (6, 2)
    with pytest.raises(InvalidArgument, match="bf16") as caught:
        call(**{name: tensor("f16", rows, heads, 128)})
    assert caught.value.name == name


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize(("dim", "found"), [(128, 256), (256, 128), (128, 64)])
def test_another_head_dim_is_refused_by_name(
    call: Call, tensor: Call, name: str, dim: int, found: int
) -> None:
    rows, heads = (4, 8) if name in ("q", "out") else (6, 2)
    with pytest.raises(InvalidArgument) as caught:
        call(dim, **{name: tensor("bf16", rows, heads, found)})
    assert caught.value.name == name
    assert str(dim) in str(caught.value.expected)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q", (4, 1024)),
        ("k", (6, 2, 128, 1)),
        ("v", (5, 2, 128)),
        ("v", (6, 1, 128)),
        ("out", (3, 8, 128)),
        ("out", (4, 4, 128)),
    ],
)
def test_a_tensor_of_another_shape_is_refused_by_name(
    call: Call, tensor: Call, name: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call(**{name: tensor("bf16", *shape)})
    assert caught.value.name == name


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_tensor_with_gaps_is_refused_by_name(
    call: Call, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def read(given: str, value: Any) -> Tensor:
        facts = read_tensor(given, value)
        return replace(facts, strides=(facts.strides[0] * 2, *facts.strides[1:])) if given == name else facts

    monkeypatch.setattr(ragged_prefill, "read_tensor", read)
    with pytest.raises(InvalidArgument, match="contiguous") as caught:
        call()
    assert caught.value.name == name


def test_tensors_of_two_devices_are_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(given: str, value: Any) -> Tensor:
        return replace(read_tensor(given, value), device=GPU if given == "q" else HOST)

    monkeypatch.setattr(ragged_prefill, "read_tensor", read)
    with pytest.raises(InvalidArgument, match="cuda"):
        call()


def test_what_is_no_tensor_is_refused_by_name(call: Call) -> None:
    with pytest.raises(InvalidArgument, match="DLPack") as caught:
        call(k=[[1.0]])
    assert caught.value.name == "k"


def test_without_out_another_library_than_torch_is_told_to_bring_one(call: Call) -> None:
    with pytest.raises(InvalidArgument, match="torch") as caught:
        call(out=None)
    assert caught.value.name == "out"


@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr"])
@pytest.mark.parametrize(
    ("indptr", "message"),
    [
        ([], "at least two numbers"),
        ([0], "at least two numbers"),
        ([1, 2, 4], "0 at its start"),
        ([0, 5, 4], "never fall"),
        ([0, 1, 2], "the rows"),
        ([0, 1, 9], "the rows"),
        ([0.0, 1.0, 4.0], "host integers"),
        ([[0, 4]], "one-dimensional"),
        ([0, 2**40], "int32"),
        ("abc", "host integers"),
    ],
)
def test_a_wrong_indptr_is_refused_by_name(call: Call, name: str, indptr: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        call(**{name: indptr})
    assert caught.value.name == name


def test_heads_that_do_not_divide_are_refused(call: Call, tensor: Call) -> None:
    with pytest.raises(InvalidArgument, match="num_kv_heads"):
        call(k=tensor("bf16", 6, 3, 128), v=tensor("bf16", 6, 3, 128))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), "1"])
def test_a_scale_that_is_no_positive_number_is_refused(call: Call, scale: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call(sm_scale=scale)
    assert caught.value.name == "sm_scale"


def test_causal_is_true_or_false(call: Call) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call(causal=1)
    assert caught.value.name == "causal"


class Ledger:
    """Stands for a device's ground: notes what happens on which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[tuple[str, int]] = []
        self.stream = 1
        self.failing = ""
        self.done = SimpleNamespace(
            hold=lambda at: self.note("hold", at), record=lambda at: self.note("done", at)
        )
        ledger = self

        class Plan:
            @classmethod
            def ragged(cls, *_: Any, **__: Any) -> Plan:
                return cls()

            def plan(self, *_: Any, stream: int) -> None:
                ledger.note("plan", stream)

            def run(self, *_: Any, stream: Any) -> None:
                ledger.note("run", ledger.stream)

        facts = {"q": (4, 8, 128), "k": (4, 2, 128), "v": (4, 2, 128), "out": (4, 8, 128)}
        ground = ragged_prefill._Ground(SimpleNamespace(device=GPU), self.done)
        for name, stand_in in {
            "opened": lambda cache: self,
            "read_tensor": lambda name, value: Tensor(
                name, value, "bf16", facts[name], (facts[name][1] * 128, 128, 1), GPU
            ),
            "current_stream": lambda device: self.stream,
            "_ground": lambda device: ground,
            "BatchPrefillPlan": Plan,
        }.items():
            monkeypatch.setattr(ragged_prefill, name, stand_in)

    def note(self, what: str, stream: int) -> None:
        self.notes.append((what, stream))
        if what == self.failing:
            raise RuntimeError(what)

    def call(self, *, stream: int, indptr: list[int]) -> list[tuple[str, int]]:
        """Call on a stream; return what happened."""
        self.stream, self.notes = stream, []
        try:
            ragged_prefill_bf16_hd128(1, 1, 1, indptr, indptr, out=1, causal=True)
        except RuntimeError:
            assert self.failing
        return self.notes


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    return Ledger(monkeypatch)


def test_lengths_are_planned_once_and_again_after_others(ledger: Ledger) -> None:
    assert ledger.call(stream=1, indptr=[0, 4]) == [("plan", 1), ("run", 1), ("done", 1)]
    assert ledger.call(stream=1, indptr=[0, 4]) == [("run", 1), ("done", 1)]
    assert ("plan", 1) in ledger.call(stream=1, indptr=[0, 1, 4])
    assert ("plan", 1) in ledger.call(stream=1, indptr=[0, 4])


def test_a_call_on_another_stream_is_ordered_behind_the_last(ledger: Ledger) -> None:
    ledger.call(stream=1, indptr=[0, 4])
    assert ledger.call(stream=2, indptr=[0, 4]) == [("hold", 2), ("plan", 2), ("run", 2), ("done", 2)]


@pytest.mark.parametrize("failing", ["plan", "run"])
def test_a_call_is_ordered_behind_one_that_failed_on_another_stream(ledger: Ledger, failing: str) -> None:
    ledger.call(stream=1, indptr=[0, 4])
    ledger.failing = failing
    assert ledger.call(stream=2, indptr=[0, 1, 4])[-1] == ("done", 2)
    ledger.failing = ""
    assert ledger.call(stream=3, indptr=[0, 2, 4])[:2] == [("hold", 3), ("plan", 3)]
    assert ledger.call(stream=1, indptr=[0, 4])[:2] == [("hold", 1), ("plan", 1)]


def test_lengths_whose_plan_failed_are_planned_again(ledger: Ledger) -> None:
    ledger.failing = "plan"
    ledger.call(stream=1, indptr=[0, 4])
    ledger.failing = ""
    assert ledger.call(stream=1, indptr=[0, 4]) == [("plan", 1), ("run", 1), ("done", 1)]
