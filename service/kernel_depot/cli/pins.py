"""`kernel-depot pins`: look at pin sets before they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Check pin sets; list and activate their revisions.")

ServerOption = Annotated[str, typer.Option("--server", envvar="KERNEL_DEPOT_SERVER", help="The depot's URL.")]
TokenOption = Annotated[
    str | None, typer.Option("--token", envvar="KERNEL_DEPOT_TOKEN", help="A bearer token of the depot.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the depot's answer as JSON.")]


@app.callback()
def pins() -> None:
    """Check pin sets; list and activate their revisions."""


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


@app.command()
def revisions(
    name: Annotated[str, typer.Argument(help="A pin set of the depot.")],
    server: ServerOption,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what was recorded under a pin set's name, the newest first."""
    from kernel_depot.builder.depot import Depot
    from kernel_depot.cli.render import print_json

    with Depot(server, token=token) as depot:
        answer = depot.revisions(name)
    if as_json:
        print_json(answer)
        return
    for row in answer["revisions"]:
        state = "current" if row["current"] else "materialized" if row["materialized"] else "proposed"
        typer.echo(f"{row['revision']}  {state:12}  {row['created_at']}  {row['origin']}")


@app.command()
def activate(
    name: Annotated[str, typer.Argument(help="A pin set of the depot.")],
    revision: Annotated[str, typer.Argument(help="The revision that the name is to mean.")],
    server: ServerOption,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a pin set's name mean a recorded revision whose wheels are in the store (scope admin)."""
    from kernel_depot.builder.depot import Depot
    from kernel_depot.cli.render import print_json

    with Depot(server, token=token) as depot:
        answer = depot.activate(name, revision)
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"pin set {answer['name']}: revision {answer['revision']} is current")
