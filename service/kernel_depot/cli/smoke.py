"""`kernel-depot smoke`: load and try what the synced bundle holds on this node."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kernel_depot.cli.sync import CacheOption, JsonOption
from kernel_depot.worker.location import default_cache

app = typer.Typer(add_completion=False)


@app.command()
def smoke(
    cache: CacheOption = None,
    modules: Annotated[str, typer.Option(help="Comma-separated module names, or all.")] = "all",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one check may take.")] = 60.0,
    cubins: Annotated[int, typer.Option(min=1, help="How many cubins to load through the driver.")] = 32,
    jobs: Annotated[int, typer.Option(min=0, help="Checks at once; 0 chooses.", show_default=False)] = 0,
    on_cpu: Annotated[
        bool, typer.Option("--on-cpu", help="Also judge modules compiled for the CPU, on its tensors.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check every file of the bundle, load what this host can run, and compare what it computes with float64.

    Exit 1 when anything is wrong.
    """
    from kernel_depot.smoke.cases import Limits, this_host
    from kernel_depot.smoke.cases import smoke as run
    from kernel_depot.worker.cache import Cache

    names = None if modules == "all" else [word.strip() for word in modules.split(",") if word.strip()]
    limits = Limits(timeout=timeout, cubins=cubins, jobs=jobs or min(8, len(os.sched_getaffinity(0))))
    report = run(Cache(cache or default_cache()), host=this_host(on_cpu=on_cpu), modules=names, limits=limits)
    if as_json:
        from kernel_depot.cli.render import print_json

        print_json(report.to_json())
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"bundle {report.digest[:12]} for {report.platform} on {report.gpu or 'no GPU'}")
        for column in ("check", "of", "outcome", "detail"):
            table.add_column(column, overflow="fold")
        for row in report.rows():
            table.add_row(*row)
        Console().print(table)
        print(
            ", ".join(f"{count} {status}" for status, count in sorted(report.counts.items())) or "no checks"
        )
    if not report.ok:
        raise typer.Exit(1)
