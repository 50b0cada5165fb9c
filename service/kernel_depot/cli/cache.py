"""`kernel-depot cache`: list what this node's cache holds, and check its blobs."""

from __future__ import annotations

from dataclasses import asdict

import typer

from kernel_depot.cli.sync import CacheOption, JsonOption
from kernel_depot.worker.location import default_cache

app = typer.Typer(add_completion=False, no_args_is_help=True, help="List and check this node's cache.")


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
