"""A benchmark's results: rows that say who produced each number, as JSON, as a table, and against another."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kernel_depot.opponent.duel import Outcome
from kernel_depot.opponent.errors import ReportInvalid, ShapesInvalid
from kernel_depot.opponent.shapes import Shape, read_shape

SCHEMA: Final = 1
BENCHMARK: Final = "ragged-prefill"
Row = dict[str, Any]


def row_of(
    shape: Shape, opponent: Outcome, challenger: Outcome, clocks: list[int], machine: dict[str, Any]
) -> Row:
    """Return one shape's row, which also names the GPU and its driver.

    `ratio` is the challenger's time over the opponent's: above 1 it is slower.
    """
    ceiling = float(machine["matmul_tflops"])
    sides = {
        "opponent": _side(shape, opponent, ceiling),
        "challenger": _side(shape, challenger, ceiling),
    }
    ratio = None
    if opponent.timing is not None and challenger.timing is not None:
        ratio = challenger.timing.median / opponent.timing.median
    seen = [min(clocks), max(clocks)] if clocks else None
    return {
        "shape": shape.to_json(),
        **sides,
        "ratio": ratio,
        "gpu": machine["gpu"],
        "driver": machine["driver"],
        "sm_clock_mhz": seen,
    }


def report_of(rows: Sequence[Row], machine: dict[str, Any]) -> dict[str, Any]:
    """Return the whole report."""
    return {"schema": SCHEMA, "benchmark": BENCHMARK, "machine": machine, "rows": list(rows)}


def read_report(path: Path) -> dict[str, Any]:
    """Read what `bench --output` or `bench --json` wrote. Raise ReportInvalid."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportInvalid(f"{path.name} is no benchmark report: {error}", where=str(path)) from error
    return checked(report, where=str(path))


def checked(report: Any, *, where: str) -> dict[str, Any]:
    """Return a report whose shapes, names and times can be compared. Raise ReportInvalid for another."""
    if not isinstance(report, dict) or (report.get("schema"), report.get("benchmark")) != (SCHEMA, BENCHMARK):
        raise ReportInvalid(
            "this is no benchmark report", where=where, expected=f"schema {SCHEMA}, benchmark {BENCHMARK}"
        )
    if not isinstance(report.get("machine"), dict) or not isinstance(report.get("rows"), list):
        raise ReportInvalid("the report lacks its machine or its rows", where=where)
    for number, row in enumerate(report["rows"], 1):
        _check_row(row, where=f"{where}, row {number}")
    found: dict[str, Any] = report
    return found


def _check_row(row: Any, *, where: str) -> None:
    try:
        read_shape(row["shape"], where=where)
        for name in _SIDES:
            side = row[name]
            median, spread = side["median_ms"], side["spread_ms"]
            timed = median is not None
            if not side["name"] or (timed and not (_is_number(median) and _is_number(spread) and median > 0)):
                raise ReportInvalid(
                    f"the row's {name} has no name, or a time without its spread", where=where, found=side
                )
    except ShapesInvalid as error:
        raise ReportInvalid(
            f"the row's shape: {error.what}", where=where, expected=error.expected, found=error.found
        ) from error
    except (KeyError, TypeError) as error:
        raise ReportInvalid(
            f"the row lacks a member: {error}", where=where, expected="shape, opponent, challenger"
        ) from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a Markdown table; times in milliseconds, medians with quartile distances."""
    machine = report["machine"]
    lines = [
        f"{machine['gpu']}, driver {machine['driver']}, {machine['date']}; bf16 matmul ceiling "
        f"{machine['matmul_tflops']:.0f} TFLOP/s. `ratio` is the challenger's time over the opponent's.",
        "",
        "| batch | rows | hd | heads | mask | opponent ms | TFLOP/s | of ceiling | error | challenger ms "
        "| TFLOP/s | error | ratio |",
        "|---" * 13 + "|",
    ]
    for row in report["rows"]:
        shape, a, b = row["shape"], row["opponent"], row["challenger"]
        mask = "causal" if shape["causal"] else "full"
        heads = f"{shape['num_qo_heads']}/{shape['num_kv_heads']}"
        ratio = f"{row['ratio']:.2f}" if row["ratio"] is not None else "-"
        lines.append(
            f"| {shape['batch']} | {shape['rows']} | {shape['head_dim']} | {heads} | {mask} | {_time(a)} "
            f"| {_number(a['tflops'])} | {_share(a['of_ceiling'])} | {_error(a)} | {_time(b)} "
            f"| {_number(b['tflops'])} | {_error(b)} | {ratio} |"
        )
    names = {(row["opponent"]["name"], row["challenger"]["name"]) for row in report["rows"]}
    lines += ["", *(f"Opponent: {a}. Challenger: {b}." for a, b in sorted(names))]
    return "\n".join(lines) + "\n"


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Say for each shape and side that both reports timed how it changed; inside the spread it did not.

    What else differs stands beside: another GPU, driver or torch before all lines, another version or module
    of a side in its line. Sides of different names are not compared.
    """
    lines = [
        f"the reports differ in {name}: {before['machine'].get(name)}, then {after['machine'].get(name)}"
        for name in ("gpu", "driver", "torch")
        if before["machine"].get(name) != after["machine"].get(name)
    ]
    known = {read_shape(row["shape"], where="shape"): row for row in before["rows"]}
    for row in after["rows"]:
        shape = read_shape(row["shape"], where="shape")
        if shape in known:
            lines += [
                f"{shape}: {line}"
                for name in _SIDES
                if (line := _change(known[shape][name], row[name])) is not None
            ]
    return lines


def _change(old: Row, new: Row) -> str | None:
    if old["median_ms"] is None or new["median_ms"] is None:
        return None
    if old["name"] != new["name"]:
        return f"not compared: {old['name']} is not {new['name']}"
    change = new["median_ms"] / old["median_ms"]
    inside = abs(new["median_ms"] - old["median_ms"]) <= max(new["spread_ms"], old["spread_ms"])
    verdict = "no difference" if inside else f"{'slower' if change > 1 else 'faster'}, x{change:.3f}"
    return f"{new['name']}{_edition(old, new)}: {verdict}"


def _edition(old: Row, new: Row) -> str:
    """Tell whether a side of the same name is another build."""
    if old.get("version") != new.get("version"):
        return f" ({old.get('version')}, then {new.get('version')})"
    return " (another module)" if old.get("module_sha256") != new.get("module_sha256") else ""


_SIDES: Final = ("opponent", "challenger")


def _side(shape: Shape, outcome: Outcome, ceiling: float) -> dict[str, Any]:
    timing = outcome.timing
    tflops = shape.flops() / timing.median / 1e9 if timing is not None else None
    return {
        "name": outcome.side.name,
        "version": outcome.side.version,
        "module_sha256": outcome.side.digest,
        "relative_error": outcome.relative_error,
        "median_ms": timing.median if timing is not None else None,
        "spread_ms": timing.spread if timing is not None else None,
        "rounds": timing.rounds if timing is not None else 0,
        "tflops": tflops,
        "of_ceiling": tflops / ceiling if tflops is not None else None,
        "tokens_per_s": shape.rows / timing.median * 1e3 if timing is not None else None,
        "host_counts": outcome.side.host_counts,
        "problem": outcome.problem,
    }


def _time(side: dict[str, Any]) -> str:
    if side["median_ms"] is None:
        return str(side["problem"] or "-").split("\n")[0][:60]
    return f"{side['median_ms']:.3f} ± {side['spread_ms']:.3f}"


def _number(value: float | None) -> str:
    return f"{value:.0f}" if value is not None else "-"


def _share(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "-"


def _error(side: dict[str, Any]) -> str:
    return f"{side['relative_error']:.1e}" if side["relative_error"] is not None else "-"
