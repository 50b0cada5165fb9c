"""`kernel-depot bench` without a GPU: what is kept when a run stops early, and what is refused before one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kernel_depot.cli import bench
from kernel_depot.opponent import plot
from kernel_depot.opponent.duel import Outcome, Timing
from kernel_depot.opponent.errors import BenchmarkImpossible, BenchmarkStopped, OpponentOff, ReportRefused
from kernel_depot.opponent.results import read_report, row_of
from kernel_depot.opponent.shapes import default_shapes
from kernel_depot.opponent.sides import Side

MACHINE = {"gpu": "a GPU", "driver": "1", "torch": "2", "date": "2026-01-01", "matmul_tflops": 600.0}
SERVER = "http://127.0.0.1:9"


def rows(*_: Any, **__: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Measure the grid's first shape, then stop."""
    sides = [
        Outcome(Side(name, "1", lambda _: None), 2e-3, Timing(ms, 0.01, 50))
        for name, ms in (("FlashInfer ragged prefill, fa3", 1.0), ("mine:kernel", 2.0))
    ]
    yield MACHINE, row_of(default_shapes()[0], sides[0], sides[1], [1980], MACHINE)
    raise BenchmarkStopped("the GPU is gone", where="a shape")


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(bench.app, ["ragged-prefill", *map(str, arguments)])


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_rows", rows)


@pytest.mark.usefixtures("stopping")
def test_a_run_that_stops_early_fails_and_keeps_what_it_measured(tmp_path: Path) -> None:
    output, table, drawn = (tmp_path / name for name in ("report.json", "table.md", "ratio.png"))
    done = run("--output", output, "--markdown", table, "--plot", drawn)
    assert isinstance(done.exception, BenchmarkStopped)
    assert "ratio 2.00" in done.stdout
    assert "143 of 144 shapes were not measured" in done.stdout
    assert len(read_report(output)["rows"]) == 1
    assert "| 2.00 |" in table.read_text()
    assert drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("stopping")
def test_with_json_the_failure_carries_the_report() -> None:
    done = run("--json")
    assert isinstance(done.exception, BenchmarkStopped)
    assert done.stdout == ""
    assert len(done.exception.problem()["report"]["rows"]) == 1


def test_a_report_that_no_server_takes_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_row(*_: Any, **__: Any) -> Iterator[Any]:
        yield next(rows())

    monkeypatch.setattr(bench, "_rows", one_row)
    done = run("--report", SERVER, "--json")
    assert isinstance(done.exception, ReportRefused)
    assert json.loads(json.dumps(done.exception.problem()))["report"]["rows"][0]["ratio"] == 2.0


def test_a_failure_before_the_first_row_is_that_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def off(*_: Any, **__: Any) -> Iterator[Any]:
        raise OpponentOff("off")
        yield

    monkeypatch.setattr(bench, "_rows", off)
    output = tmp_path / "report.json"
    assert isinstance(run("--output", output).exception, OpponentOff)
    assert not output.exists()


@pytest.mark.usefixtures("stopping")
@pytest.mark.parametrize("option", ["--output", "--markdown", "--plot"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, option: str
) -> None:
    for place in (tmp_path / "none" / "file", tmp_path):
        done = run(option, place)
        assert isinstance(done.exception, BenchmarkImpossible)
        assert done.exception.where == str(place)
        assert done.stdout == ""


@pytest.mark.usefixtures("stopping")
def test_a_plot_without_its_library_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(plot.importlib, "import_module", missing)
    done = run("--plot", tmp_path / "ratio.png")
    assert isinstance(done.exception, BenchmarkImpossible)
    assert "kernel-depot[bench]" in str(done.exception.remedy)
    assert done.stdout == ""


def test_post_needs_a_server(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"schema": 1, "benchmark": "ragged-prefill", "machine": MACHINE, "rows": []}))
    done = CliRunner().invoke(bench.app, ["post", str(path)])
    assert done.exit_code == 2
    assert "--server" in done.output
