"""`kernel-depot smoke`: load and try what the synced bundle holds on this node."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_depot.cli.sync import CacheOption, JsonOption, ServerOption, TokenOption
from kernel_depot.worker.location import default_cache

if TYPE_CHECKING:
    from kernel_depot.smoke.report import SmokeReport

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
    report: Annotated[
        bool, typer.Option("--report", help="Bring the modules' results to the server, for its matrix.")
    ] = False,
    server: ServerOption = None,
    token: TokenOption = None,
    name: Annotated[
        str | None,
        typer.Option(
            envvar="KERNEL_DEPOT_NODE", help="What the depot calls this node.", show_default="the host's name"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every file of the bundle, load what this host can run, and compare what it computes with float64.

    Exit 1 when anything is wrong.
    """
    if report and server is None:
        raise typer.BadParameter("name the server to report to", param_hint="--server")
    from kernel_depot.smoke.cases import Limits, this_host
    from kernel_depot.smoke.cases import smoke as run
    from kernel_depot.worker.cache import Cache

    names = None if modules == "all" else [word.strip() for word in modules.split(",") if word.strip()]
    limits = Limits(timeout=timeout, cubins=cubins, jobs=jobs or min(8, len(os.sched_getaffinity(0))))
    found = run(Cache(cache or default_cache()), host=this_host(on_cpu=on_cpu), modules=names, limits=limits)
    if as_json:
        from kernel_depot.cli.render import print_json

        print_json(found.to_json())
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"bundle {found.digest[:12]} for {found.platform} on {found.gpu or 'no GPU'}")
        for column in ("check", "of", "outcome", "detail"):
            table.add_column(column, overflow="fold")
        for row in found.rows():
            table.add_row(*row)
        Console().print(table)
        print(", ".join(f"{count} {status}" for status, count in sorted(found.counts.items())) or "no checks")
    if report and server is not None:
        _tell(found, server=server, token=token, name=name or socket.gethostname())
    if not found.ok:
        raise typer.Exit(1)


def _tell(found: SmokeReport, *, server: str, token: str | None, name: str) -> None:
    """Bring the results to the server, which knows the node by its agent's registration."""
    from kernel_depot.agent.control import Control
    from kernel_depot.worker.client import Endpoint

    control = Control(Endpoint(server, token=token), node=name, longest_wait=0.0)
    try:
        control.smoke(
            bundle=found.digest,
            gpu=found.gpu,
            driver=found.driver,
            results=[result.to_json() for result in found.results()],
        )
    finally:
        control.close()
