"""`kernel-depot pins`: look at pin sets before they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Check pin sets.")


@app.callback()
def pins() -> None:
    """Check pin sets."""


@app.command()
def check(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="TOML pin sets, or a Cargo.toml that carries pins."),
    ],
    allow_file_urls: Annotated[
        bool, typer.Option("--allow-file-urls", help="Accept file: URLs as places of wheels.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list.")] = False,
) -> None:
    """Report every problem of the given pin sets with file, line and table; exit 1 if one is an error."""
    from kernel_depot.cli.render import print_json
    from kernel_depot.pins.check import check as check_pins
    from kernel_depot.pins.problem import Severity

    problems = check_pins(files, allow_file_urls=allow_file_urls)
    errors = sum(problem.severity is Severity.ERROR for problem in problems)
    if as_json:
        print_json([problem.to_json() for problem in problems])
    else:
        for problem in problems:
            typer.echo(str(problem))
        count = f"{len(files)} pin set{'s' if len(files) != 1 else ''}"
        typer.echo(f"{count}: {errors} errors, {len(problems) - errors} warnings")
    if errors:
        raise typer.Exit(1)
