"""`kernel-depot cache`: list what this node's cache holds, check its blobs, make room."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kernel_depot.cli.sync import CacheOption, JsonOption
from kernel_depot.worker.location import default_cache

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="List and check this node's cache, and make room in it."
)


@app.command("ls")
def ls(cache: CacheOption = None, as_json: JsonOption = False) -> None:
    """List the bundles in the cache with their sizes; `*` marks the current one."""
    from kernel_depot.cli.render import print_json, size_text
    from kernel_depot.worker.cache import Cache
    from kernel_depot.worker.holdings import holdings

    held = holdings(Cache(cache or default_cache()))
    if as_json:
        print_json(asdict(held))
        return
    for bundle in held.bundles:
        state = f"{bundle.missing} missing" if bundle.missing else "whole"
        print(
            f"{'*' if bundle.current else ' '} {bundle.digest}  {bundle.platform}  {bundle.blobs} blobs, "
            f"{size_text(bundle.bytes)} ({size_text(bundle.own_bytes)} its own), {state}, "
            f"views: {', '.join(bundle.views) or 'none'}"
        )
    for digest in held.unreadable:
        print(f"  {digest}  manifest torn: sync again")
    print(
        f"{held.blobs} blobs, {size_text(held.bytes)}, of which no bundle here names "
        f"{size_text(held.unnamed_bytes)}"
    )


@app.command("verify")
def verify(cache: CacheOption = None, as_json: JsonOption = False) -> None:
    """Hash every blob; exit 1 when one is not what its name says. Changes nothing."""
    from kernel_depot.cli.render import print_json, size_text
    from kernel_depot.worker import holdings
    from kernel_depot.worker.cache import Cache

    seen = holdings.verify(Cache(cache or default_cache()))
    if as_json:
        print_json(
            {
                "blobs": seen.blobs,
                "bytes": seen.bytes,
                "wrong": [{"path": str(blob.path), "found": blob.found} for blob in seen.wrong],
            }
        )
    else:
        for blob in seen.wrong:
            print(f"wrong: {blob.path}\n  its bytes have the digest {blob.found}")
        print(f"{seen.blobs} blobs, {size_text(seen.bytes)} hashed, {len(seen.wrong)} wrong")
        if seen.wrong:
            print(
                "what to do: delete these files, then `kernel-depot sync` fetches them and repairs the views"
            )
    if seen.wrong:
        raise typer.Exit(1)


@app.command("gc")
def gc(
    limit: Annotated[
        str | None,
        typer.Option(
            help="What the blobs may take, as 200GiB.", show_default="only what no bundle names goes"
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, remove nothing.")] = False,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove bundles, least recently used first, until the blobs fit; exit 1 when they cannot.

    What is current, pinned, or used by a running process stays.
    """
    from kernel_depot.cli.agent import read_size
    from kernel_depot.cli.render import print_json, size_text
    from kernel_depot.worker.cache import Cache
    from kernel_depot.worker.collection import collect

    done = collect(
        Cache(cache or default_cache()),
        limit=read_size(limit) if limit is not None else None,
        dry_run=dry_run,
    )
    if as_json:
        print_json({**asdict(done), "over": done.over})
    else:
        would = "would remove" if dry_run else "removed"
        print(
            f"{would} {len(done.removed)} bundles, {done.removed_blobs} blobs: "
            f"{size_text(done.before)} -> {size_text(done.after)}"
        )
        for digest in done.removed:
            print(f"  {digest}")
        if done.over:
            print(f"{size_text(done.over)} over the limit; these stay:")
            for kept in done.kept:
                print(f"  {kept.digest}  {kept.why}")
    if done.over:
        raise typer.Exit(1)


@app.command("pin")
def pin(
    digest: Annotated[str, typer.Argument(help="A bundle that `cache ls` shows.")],
    off: Annotated[bool, typer.Option("--off", help="Let collections take it again.")] = False,
    cache: CacheOption = None,
) -> None:
    """Let no collection take a bundle."""
    from kernel_depot.worker import collection
    from kernel_depot.worker.cache import Cache

    place = Cache(cache or default_cache())
    if off:
        collection.unpin(place, digest)
    else:
        collection.pin(place, digest)
    print(f"bundle {digest} is {'no longer ' if off else ''}pinned")
