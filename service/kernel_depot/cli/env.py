"""`kernel-depot env`: print the exports that make programs on this node use the synced files."""

from __future__ import annotations

import typer

from kernel_depot.cli.run import RecordOption
from kernel_depot.cli.sync import CacheOption, JsonOption
from kernel_depot.worker.location import default_cache

app = typer.Typer(add_completion=False)


@app.command()
def env(cache: CacheOption = None, record: RecordOption = None, as_json: JsonOption = False) -> None:
    """Print lines for `eval "$(kernel-depot env)"`, or the same as JSON."""
    from kernel_depot.worker.cache import Cache
    from kernel_depot.worker.environment import environment

    wanted = environment(Cache(cache or default_cache()), record=record)
    if as_json:
        from kernel_depot.cli.render import print_json

        print_json(
            {
                "variables": wanted.variables,
                "python_path": list(wanted.python_path),
                "notes": list(wanted.notes),
            }
        )
    else:
        print(wanted.shell())
