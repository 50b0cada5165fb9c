"""The typer side of `kernel-depot`: its help, and the commands by name, each imported when it is run."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import kernel_depot
from kernel_depot.cli.main import COMMANDS, load


class LazyGroup(TyperGroup):
    """A group that knows its commands by name and help, and imports the one that is dispatched."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the command names in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return a nameplate, enough for listing; `resolve_command` loads the real one."""
        command = COMMANDS.get(cmd_name)
        if command is None:
            return None
        return TyperCommand(name=cmd_name, help=command.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command the arguments name, its module imported now."""
        name, nameplate, rest = super().resolve_command(ctx, args)
        if name is None or nameplate is None:
            return name, nameplate, rest
        return name, load(name), rest


app = typer.Typer(
    cls=LazyGroup,
    help="Kernel Depot: GPU kernel binaries, pinned, verified once, shared by all, proven on each node.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kernel-depot {kernel_depot.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback of a failure (or set KERNEL_DEPOT_DEBUG=1).")
    ] = False,
) -> None:
    """Take the options that stand before the command; `main` acts on them."""
