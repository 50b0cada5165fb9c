"""`kernel-depot run -- CMD…`: become a program that uses the synced files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernel_depot.cli.sync import CacheOption
from kernel_depot.worker.location import default_cache

RecordOption = Annotated[
    Path | None,
    typer.Option("--record", help="Write down which modules FlashInfer asks for; read by `coverage`."),
]

app = typer.Typer(add_completion=False)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="CMD…", help="The program and its arguments.")],
    cache: CacheOption = None,
    record: RecordOption = None,
) -> None:
    """Run CMD with what `kernel-depot env` exports; process, signals and exit status are CMD's own.

    A CMD that is not there exits 127, one that cannot be run 126.
    """
    import os

    from kernel_depot.cli.render import show_failure
    from kernel_depot.worker.cache import Cache
    from kernel_depot.worker.environment import environment
    from kernel_depot.worker.errors import ProgramNotRun
    from kernel_depot.worker.launch import become

    wanted = environment(Cache(cache or default_cache()), record=record)
    try:
        become(command, wanted.over(os.environ))
    except ProgramNotRun as error:
        show_failure(error, as_json=False, debug=False)
        raise typer.Exit(error.exit_status) from None
