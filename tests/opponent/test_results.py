"""Shapes, rows and comparisons of the benchmark, which need no GPU."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.opponent.duel import Outcome, Timing
from kernel_depot.opponent.errors import ChallengerInvalid, ReportInvalid, ShapesInvalid
from kernel_depot.opponent.plot import draw
from kernel_depot.opponent.results import checked, compare, markdown, read_report, report_of, row_of
from kernel_depot.opponent.shapes import Shape, default_shapes, read_shapes
from kernel_depot.opponent.sides import Side, challenger_side

SHAPE = Shape(4, 512, 128, 32, 8, causal=True)
MACHINE = {"gpu": "a GPU", "driver": "1", "torch": "2", "date": "2026-01-01", "matmul_tflops": 600.0}


def side(name: str) -> Side:
    return Side(name, "0.6.3", lambda _: None, "ab" * 32)


def report(opponent_ms: float, challenger_ms: float, *, spread: float = 0.01) -> dict[str, Any]:
    outcomes = [
        Outcome(side(name), 2e-3, Timing(time, spread, 50))
        for name, time in (("FlashInfer ragged prefill, fa3", opponent_ms), ("mine:kernel", challenger_ms))
    ]
    return report_of([row_of(SHAPE, outcomes[0], outcomes[1], [1500, 1980], MACHINE)], MACHINE)


def test_the_default_grid_is_the_documented_one() -> None:
    shapes = default_shapes()
    assert len(shapes) == len(set(shapes)) == 144
    assert {shape.batch for shape in shapes} == {1, 4, 16}
    assert {shape.num_qo_heads // shape.num_kv_heads for shape in shapes} == {1, 4, 8}


@given(st.integers(1, 64), st.integers(64, 4096), st.integers(0, 5))
def test_lengths_fill_the_rows_and_every_request_has_one(batch: int, rows: int, seed: int) -> None:
    shape = Shape(batch, rows, 128, 8, 8, causal=False, seed=seed)
    lengths = shape.lengths()
    assert len(lengths) == batch
    assert sum(lengths) == rows
    assert min(lengths) >= 1
    assert shape.lengths() == lengths


def test_flops_count_only_pairs_that_are_seen() -> None:
    full, causal = (Shape(1, 8, 128, 1, 1, causal=mask) for mask in (False, True))
    assert full.flops() == 4 * 64 * 128
    assert causal.flops() == 4 * 36 * 128


def test_a_row_says_who_produced_each_number() -> None:
    (row,) = report(1.0, 2.0)["rows"]
    assert row["ratio"] == 2.0
    assert row["opponent"]["name"].startswith("FlashInfer")
    assert "FlashInfer" not in row["challenger"]["name"]
    assert row["opponent"]["module_sha256"] == "ab" * 32
    assert row["opponent"]["of_ceiling"] == pytest.approx(row["opponent"]["tflops"] / 600)
    assert row["sm_clock_mhz"] == [1500, 1980]
    assert (row["gpu"], row["driver"]) == ("a GPU", "1")


def test_a_side_that_is_wrong_is_reported_and_not_timed() -> None:
    wrong = Outcome(side("mine:kernel"), 0.5, None, "wrong: 5.00e-01 from float64, allowed 1e-02")
    good = Outcome(side("FlashInfer ragged prefill, fa3"), 2e-3, Timing(1.0, 0.1, 50))
    row = row_of(SHAPE, good, wrong, [], MACHINE)
    assert row["ratio"] is None
    assert row["challenger"]["median_ms"] is None
    assert "wrong: 5.00e-01" in markdown(report_of([row], MACHINE))


def test_a_difference_inside_the_spread_is_none() -> None:
    before = report(1.0, 2.0, spread=0.1)
    lines = compare(before, report(1.05, 4.0, spread=0.02))
    assert lines[0].endswith("FlashInfer ragged prefill, fa3: no difference")
    assert lines[1].endswith("mine:kernel: slower, x2.000")


def test_kernels_of_other_names_are_not_compared() -> None:
    other = copy.deepcopy(report(1.0, 2.0))
    other["rows"][0]["challenger"]["name"] = "yours:kernel"
    assert "not compared" in compare(report(1.0, 2.0), other)[1]


def test_another_machine_or_build_is_told(tmp_path: Path) -> None:
    before, after = report(1.0, 2.0), copy.deepcopy(report(1.0, 2.0))
    after["machine"] = {**MACHINE, "gpu": "another GPU"}
    after["rows"][0]["opponent"]["version"] = "0.7.4"
    after["rows"][0]["challenger"]["module_sha256"] = "cd" * 32
    lines = compare(before, after)
    assert lines[0] == "the reports differ in gpu: a GPU, then another GPU"
    assert lines[1].endswith("fa3 (0.6.3, then 0.7.4): no difference")
    assert lines[2].endswith("mine:kernel (another module): no difference")


def test_shapes_that_only_one_report_has_are_left_out() -> None:
    other = copy.deepcopy(report(1.0, 2.0))
    other["rows"][0]["shape"]["seed"] = 1
    assert compare(report(1.0, 2.0), other) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("shape", "batch"), 0),
        (("shape",), {}),
        (("shape",), None),
        (("opponent",), None),
        (("challenger", "name"), ""),
        (("opponent", "median_ms"), 0),
        (("opponent", "median_ms"), "1"),
        (("opponent", "median_ms"), math.nan),
        (("challenger", "spread_ms"), None),
        (("challenger", "spread_ms"), -1),
    ],
)
def test_a_row_that_cannot_be_compared_is_refused_by_its_number(path: tuple[str, ...], value: Any) -> None:
    wrong = copy.deepcopy(report(1.0, 2.0))
    members = wrong["rows"][0]
    for key in path[:-1]:
        members = members[key]
    members[path[-1]] = value
    with pytest.raises(ReportInvalid) as caught:
        checked(wrong, where="file")
    assert caught.value.where == "file, row 1"


def test_a_row_without_a_member_is_refused() -> None:
    wrong = copy.deepcopy(report(1.0, 2.0))
    del wrong["rows"][0]["challenger"]["spread_ms"]
    with pytest.raises(ReportInvalid, match="spread_ms"):
        checked(wrong, where="file")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"schema": 2, "benchmark": "ragged-prefill", "machine": {}, "rows": []}',
        '{"schema": 1, "benchmark": "decode", "machine": {}, "rows": []}',
        '{"schema": 1, "benchmark": "ragged-prefill", "rows": []}',
        '{"schema": 1, "benchmark": "ragged-prefill", "machine": {}, "rows": [1]}',
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ReportInvalid):
        read_report(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("batch = 0", "batch is wrong"),
        ("head_dim = 64", "no opponent"),
        ("num_kv_heads = 3", "must divide"),
        ("rows = 1", "a row at least"),
        ('causal = "yes"', "causal is wrong"),
        ("window = 3", "other keys"),
        ("seed = -1", "seed is wrong"),
        ("rows = 2147483648", "rows is wrong"),
    ],
)
def test_a_wrong_shape_is_refused_by_name(tmp_path: Path, line: str, message: str) -> None:
    members = {
        "batch": "2",
        "rows": "8",
        "head_dim": "128",
        "num_qo_heads": "8",
        "num_kv_heads": "2",
        "causal": "true",
    }
    name, _, value = line.partition(" = ")
    members[name] = value
    path = tmp_path / "shapes.toml"
    path.write_text("[[shape]]\n" + "\n".join(f"{key} = {text}" for key, text in members.items()))
    with pytest.raises(ShapesInvalid, match=message):
        read_shapes(path)


def test_shapes_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes.toml"
    path.write_text(
        "[[shape]]\nbatch = 4\nrows = 512\nhead_dim = 128\n"
        "num_qo_heads = 32\nnum_kv_heads = 8\ncausal = true\n"
    )
    assert read_shapes(path) == [SHAPE]


@pytest.mark.parametrize("name", ["nothing", "no.such.module:f", "math:no_such", "math:pi"])
def test_a_challenger_that_cannot_be_called_is_refused(name: str) -> None:
    with pytest.raises(ChallengerInvalid):
        challenger_side(name, opponent=side("FlashInfer"))


def test_a_challenger_is_called_by_its_own_name() -> None:
    found = challenger_side("math:fsum", opponent=side("FlashInfer ragged prefill, fa3"))
    assert found.name == "math:fsum"


def test_the_ratio_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "ratio.png"
    draw(report(1.0, 2.0), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 1000
