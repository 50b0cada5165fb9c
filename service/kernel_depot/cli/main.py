"""The `kernel-depot` command. A command's module is imported only when that command runs.

The commands that programs start often do not even wait for typer, when their arguments are plain.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from importlib import import_module
from typing import Any, NamedTuple

from kernel_depot.cli.plain import plain_call
from kernel_depot.errors import DepotError


class Command(NamedTuple):
    """Where a command lives and its line in `kernel-depot --help`; the module offers a Typer named `app`."""

    module: str
    help: str
    extra: str | None = None  # the extra that brings what the module imports


class ExtraMissing(DepotError):
    """A command was run that this installation lacks the libraries for."""

    slug = "extra-missing"
    title = "Not installed"
    status = 501


COMMANDS: dict[str, Command] = {
    "demo": Command("kernel_depot.cli.demo", "Show the whole way of the data on this machine.", "server"),
    "pins": Command(
        "kernel_depot.cli.pins", "Check pin sets; let revisions roll through the fleet.", "server"
    ),
    "store": Command("kernel_depot.cli.store", "Check the bytes that a depot keeps, and mend them."),
    "warm": Command("kernel_depot.cli.warm", "Bring pinned bytes to the store and to nodes before traffic."),
    "nodes": Command("kernel_depot.cli.nodes", "See the nodes, which modules work where, who changed what."),
    "materialize": Command(
        "kernel_depot.cli.materialize",
        "Bring pinned wheels into the store: fetch, verify, extract, record.",
        "server",
    ),
    "db": Command("kernel_depot.cli.db", "Create or upgrade the catalog's schema, or check it.", "server"),
    "serve": Command("kernel_depot.cli.serve", "Serve the catalog and the blobs over HTTP.", "server"),
    "tokens": Command("kernel_depot.cli.tokens", "Create, list and revoke bearer tokens.", "server"),
    "build": Command(
        "kernel_depot.cli.build", "Compile kernel modules from a pinned source into a wheel.", "build"
    ),
    "builder": Command("kernel_depot.cli.builder", "Build what a depot's administrators queue.", "build"),
    "sync": Command("kernel_depot.cli.sync", "Bring a bundle from a server into this node's cache."),
    "agent": Command("kernel_depot.cli.agent", "Keep this node as the depot wants it, and prove it."),
    "cache": Command("kernel_depot.cli.cache", "List and check this node's cache, make room in it."),
    "env": Command("kernel_depot.cli.env", "Print the exports that make programs use the synced files."),
    "run": Command("kernel_depot.cli.run", "Run a program that uses the synced files."),
    "coverage": Command(
        "kernel_depot.cli.coverage", "List modules that were asked for and not there, as a build plan."
    ),
    "doctor": Command("kernel_depot.cli.doctor", "Say what this node has, what is missing, how to get it."),
    "bench": Command(
        "kernel_depot.cli.bench", "Measure other kernels against the opponent, which the node must have."
    ),
    "smoke": Command("kernel_depot.cli.smoke", "Load and try what the synced bundle holds on this node."),
}


def load(name: str) -> Any:
    """Import the module of the command `name` and return its click command."""
    import typer

    module = import_module(COMMANDS[name].module)
    command = typer.main.get_command(module.app)
    command.name = name
    return command


def main() -> None:
    """Run the command line; exit 0 on success, 1 on a failure, 2 on wrong usage."""
    arguments = sys.argv[1:]
    atexit.register(gc.freeze)  # or the interpreter's end goes through all that was ever imported
    try:
        call = plain_call(arguments, os.environ)
        if call is not None:
            sys.exit(call())
        from kernel_depot.cli.group import app

        app(prog_name="kernel-depot")
    except KeyboardInterrupt:
        print("Aborted.", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        from kernel_depot.cli.render import show_failure

        if isinstance(error, ModuleNotFoundError):
            error = _named(error, arguments)
        debug = "--debug" in arguments or os.environ.get("KERNEL_DEPOT_DEBUG", "") not in ("", "0")
        show_failure(error, as_json="--json" in arguments, debug=debug)
        sys.exit(1)


def _named(error: ModuleNotFoundError, arguments: list[str]) -> Exception:
    """Say which extra brings a library that a command looked for, before or while it ran."""
    name = next((word for word in arguments if not word.startswith("-")), "")
    entry = COMMANDS.get(name)
    if entry is None or entry.extra is None or (error.name or "").startswith("kernel_depot"):
        return error
    missing = ExtraMissing(
        f"`kernel-depot {name}` needs a library that is not installed",
        found=f"no module named {error.name!r}",
        remedy=f"pip install 'kernel-depot[{entry.extra}]'",
    )
    missing.__cause__ = error
    return missing


if __name__ == "__main__":
    main()
