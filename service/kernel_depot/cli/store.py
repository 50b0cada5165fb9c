"""`kernel-depot store`: check the bytes that a depot keeps."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kernel_depot.cli.control import Control, JsonOption, ServerOption, TokenOption

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Check the bytes that a depot keeps, and mend them."
)
_EVERY = 0.5


@app.callback()
def store() -> None:
    """Keep `scrub` a command of its own name while it is the only one."""


@app.command("scrub")
def scrub(
    server: ServerOption,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait until it ends.")] = False,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hash every blob again, delete the damaged ones and bring them anew (scope admin).

    With --follow exit 1 when a blob is lost.
    """
    from kernel_depot.cli.render import print_json, size_text

    with Control(server, token=token) as depot:
        job = depot.post("/v1/scrubs")
        while follow and job["state"] not in ("succeeded", "failed"):
            time.sleep(_EVERY)
            job = depot.get(f"/v1/jobs/{job['id']}")
    if as_json:
        print_json(job)
    else:
        progress = job["progress"]
        print(
            f"scrub {job['id']} {job['state']}: {progress['members_done']} blobs, "
            f"{size_text(progress['bytes_done'])}, {len(job['modules'])} damaged"
        )
        for blob in job["modules"]:
            print(f"  {blob['state']:<8} {blob['sha256']}  {blob.get('why', '')}".rstrip())
    if job["state"] == "failed":
        raise typer.Exit(1)
