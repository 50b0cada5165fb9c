"""The ratio of a benchmark by shape, drawn."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from kernel_depot.opponent.errors import BenchmarkImpossible
from kernel_depot.opponent.shapes import Shape


def require_plot() -> None:
    """Refuse before anything is measured where nothing can be drawn. Raise BenchmarkImpossible."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise BenchmarkImpossible(
            "the plot needs matplotlib, which is not installed",
            found=str(error),
            remedy="pip install 'kernel-depot[bench]'",
        ) from error


def draw(report: dict[str, Any], path: Path) -> None:
    """Write a PNG with one bar for each timed shape; a bar right of 1 is a slower challenger."""
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if row["ratio"] is not None]
    figure = Figure(figsize=(10, 1.5 + 0.22 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.barh([str(Shape(**row["shape"])) for row in rows], [row["ratio"] for row in rows])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("challenger's time / opponent's time")
    if rows:
        axes.set_title(f"{rows[0]['challenger']['name']} against {rows[0]['opponent']['name']}")
    figure.savefig(path, format="png")
