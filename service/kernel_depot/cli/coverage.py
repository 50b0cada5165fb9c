"""`kernel-depot coverage`: which modules were asked for and not there, as a build plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kernel_depot.cli.sync import CacheOption, JsonOption
from kernel_depot.worker.location import default_cache

app = typer.Typer(add_completion=False)


@app.command()
def coverage(
    record: Annotated[
        list[Path] | None,
        typer.Option("--record", help="What `run --record` wrote; may be repeated."),
    ] = None,
    workspace: Annotated[
        list[Path] | None,
        typer.Option(
            "--workspace",
            help="A FLASHINFER_WORKSPACE_BASE, where FlashInfer compiled what it lacked; may be repeated.",
            show_default="without --record: the cache's, and the home directory",
        ),
    ] = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a build plan of the modules that programs asked for and the current bundle lacks."""
    from kernel_depot.builder.lacking import lacking_plan
    from kernel_depot.worker.cache import Cache
    from kernel_depot.worker.coverage import (
        compiled_here,
        flashinfer_version,
        lacking,
        other_versions,
        read_record,
    )
    from kernel_depot.worker.environment import current_bundle, workspace_base

    here = Cache(cache or default_cache())
    bundle = current_bundle(here)
    places = workspace or ([] if record else [workspace_base(here), Path.home()])
    asked = [one for path in record or () for one in read_record(path)]
    asked += [one for place in places for one in compiled_here(place)]
    modules = lacking(asked, bundle)
    version = flashinfer_version(bundle)
    others = other_versions(asked, bundle)
    plan = lacking_plan(modules, version=version, cuda=bundle.platform.cuda, sm=bundle.platform.sm)
    if as_json:
        from kernel_depot.cli.render import print_json

        print_json(
            {
                "flashinfer": version,
                "asked": len({one.module for one in asked}),
                "lacking": modules,
                "other_versions": others,
                "plan": plan,
            }
        )
        return
    print(plan, end="")
    if others:
        print(
            f"left out: what flashinfer-python {', '.join(others)} asked for; the bundle is for {version}",
            file=sys.stderr,
        )
