"""`kernel-depot bench`: the opponent against another kernel, and reports against each other."""

from __future__ import annotations

import os
import time
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernel_depot.cli.sync import CacheOption, JsonOption, ServerOption, TokenOption
from kernel_depot.errors import DepotError

if TYPE_CHECKING:
    from kernel_depot.opponent.results import Row
    from kernel_depot.opponent.shapes import Shape

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command("ragged-prefill")
def ragged_prefill(
    challenger: Annotated[
        str,
        typer.Option(help="sdpa, single-calls (the opponent, once a request), or module:function."),
    ] = "sdpa",
    shapes: Annotated[
        Path | None, typer.Option(help="TOML tables [[shape]].", show_default="the default grid")
    ] = None,
    max_seconds: Annotated[float, typer.Option(min=1, help="Begin no shape after this time.")] = 3600.0,
    batch: Annotated[int | None, typer.Option(min=1, help="Only shapes of this batch size.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the report here, after every shape.")] = None,
    table: Annotated[Path | None, typer.Option("--markdown", help="Write a Markdown table here.")] = None,
    report_to: Annotated[
        str | None,
        typer.Option("--report", metavar="URL", help="Post the report to this server (scope node)."),
    ] = None,
    token: TokenOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratio by shape into this PNG.")] = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure FlashInfer's ragged prefill against a challenger: same box, inputs and stream.

    Both must be within 1e-2 of float64 to be timed. Needs the bundle's group `opponent` (kernel-depot sync
    --group opponent) and KERNEL_DEPOT_FLASHINFER_PREFILL=1.
    """
    from kernel_depot.cli.render import print_json
    from kernel_depot.opponent.plot import draw, require_plot
    from kernel_depot.opponent.results import markdown, report_of
    from kernel_depot.opponent.shapes import default_shapes, read_shapes

    for path in (output, table, plot):
        _require_folder(path)
    if plot is not None:
        require_plot()
    wanted = default_shapes() if shapes is None else read_shapes(shapes)
    wanted = [shape for shape in wanted if batch is None or shape.batch == batch]
    rows: list[Row] = []
    until = time.monotonic() + max_seconds
    report: dict[str, Any] = {}
    stopped: DepotError | None = None
    try:
        for machine, row in _rows(wanted, challenger, cache=cache, until=until):
            rows.append(row)
            report = report_of(rows, machine)
            if output is not None:
                _write(output, report)
            if not as_json:
                print(_line(row), flush=True)
    except DepotError as failure:
        if not rows:
            raise
        stopped = failure
    if len(rows) < len(wanted) and not as_json:
        print(
            f"{len(wanted) - len(rows)} of {len(wanted)} shapes were not measured (--max-seconds, or above)"
        )
    if table is not None and rows:
        table.write_text(markdown(report), encoding="utf-8")
    if plot is not None and rows:
        draw(report, plot)
    if report_to is not None and rows:
        try:
            digest = _post(report_to, report, token=token)
        except DepotError as failure:
            stopped = stopped or failure
        else:
            if not as_json:
                print(f"posted as {digest}")
    if stopped is not None:
        if as_json:
            stopped.data["report"] = report  # what was measured is not lost with what failed
        raise stopped
    if as_json:
        print_json(report)


@app.command()
def post(
    report: Annotated[Path, typer.Argument(help="What `bench ragged-prefill --output` wrote.")],
    server: ServerOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Post a report that was measured earlier, as on a node without the network (scope node)."""
    from kernel_depot.cli.render import print_json
    from kernel_depot.opponent.results import read_report

    found = read_report(report)
    if server is None:
        raise typer.BadParameter("name the server", param_hint="--server")
    digest = _post(server, found, token=token)
    if as_json:
        print_json({"digest": digest})
    else:
        print(f"posted as {digest}")


@app.command()
def compare(
    before: Annotated[str, typer.Argument(help="A report's file, or its digest on the server.")],
    after: Annotated[str, typer.Argument(help="Another, of the same machine.")],
    server: ServerOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say how each shape's time changed between two reports; a change inside the spread is none."""
    from kernel_depot.cli.render import print_json
    from kernel_depot.opponent.results import compare as compared

    lines = compared(*(_read(name, server=server, token=token) for name in (before, after)))
    if as_json:
        print_json({"lines": lines})
    else:
        print("\n".join(lines) or "the reports have no shape in common")


def _rows(wanted: list[Shape], challenger: str, *, cache: Path | None, until: float) -> Any:
    """Yield the machine and each row as it is measured."""
    from kernel_depot.opponent.duel import duel, matmul_ceiling
    from kernel_depot.opponent.ragged_prefill import opened
    from kernel_depot.opponent.results import row_of
    from kernel_depot.opponent.sides import challenger_side, opponent_side

    opened(cache)
    torch = _torch()
    ceiling = matmul_ceiling(torch)
    machine = _machine(torch, ceiling)
    for shape in wanted:
        if time.monotonic() > until:
            return
        opponent = opponent_side(shape, cache=cache)
        first, second, clocks = duel(torch, shape, opponent, challenger_side(challenger, opponent=opponent))
        yield machine, row_of(shape, first, second, clocks, machine)


def _require_folder(path: Path | None) -> None:
    """Refuse before anything is measured when a result could not be written."""
    from kernel_depot.opponent.errors import BenchmarkImpossible

    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise BenchmarkImpossible(
            "a result cannot be written there", where=str(path), remedy="name a file in a folder of yours"
        )


def _read(name: str, *, server: str | None, token: str | None) -> dict[str, Any]:
    from kernel_depot.digest import is_sha256
    from kernel_depot.opponent.posting import fetch
    from kernel_depot.opponent.results import read_report

    if server is not None and is_sha256(name):
        return fetch(server, name, token=token)
    return read_report(Path(name))


def _post(server: str, report: dict[str, Any], *, token: str | None) -> str:
    from kernel_depot.opponent.posting import post

    return post(server, report, token=token)


def _torch() -> Any:
    from kernel_depot.opponent.errors import BenchmarkImpossible

    try:
        import torch
    except ImportError as error:
        raise BenchmarkImpossible(
            "the benchmark makes its inputs with torch, which is not installed",
            found=str(error),
            remedy="install a torch that fits this node's CUDA",
        ) from error
    if not torch.cuda.is_available():
        raise BenchmarkImpossible("there is no CUDA GPU that torch can use", found=torch.__version__)
    return torch


def _machine(torch: Any, ceiling: float) -> dict[str, Any]:
    from kernel_depot.worker.facts import gather_facts

    facts = gather_facts()
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": facts.driver,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "matmul_tflops": ceiling,
    }


def _write(path: Path, report: dict[str, Any]) -> None:
    import json

    half = path.with_name(path.name + ".part")
    half.write_text(json.dumps(report), encoding="utf-8")
    half.replace(path)


def _line(row: Row) -> str:
    from kernel_depot.opponent.shapes import Shape

    sides = []
    for name in ("opponent", "challenger"):
        side = row[name]
        if side["median_ms"] is None:
            sides.append(f"{side['name']}: {side['problem']}")
        else:
            sides.append(f"{side['name']} {side['median_ms']:.3f} ms, {side['relative_error']:.1e}")
    ratio = f"; ratio {row['ratio']:.2f}" if row["ratio"] is not None else ""
    return f"{Shape(**row['shape'])}: {'; '.join(sides)}{ratio}"
