"""`kernel-depot agent`: keep this node as the depot wants it, and prove it, until told to stop."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Annotated

import typer

from kernel_depot.cli.sync import CacheOption, TokenOption
from kernel_depot.worker.location import default_cache

app = typer.Typer(add_completion=False)

NO_TOKEN = 78
"""Exit status for a refused token (EX_CONFIG of sysexits.h): to start again would not help."""


@app.command()
def agent(
    server: Annotated[str, typer.Option("--server", envvar="KERNEL_DEPOT_SERVER", help="The server's URL.")],
    token: TokenOption = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="KERNEL_DEPOT_TOKEN_FILE",
            help="A file that holds the token; read again when it is refused.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            envvar="KERNEL_DEPOT_NODE", help="What the depot calls this node.", show_default="the host's name"
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", help="NAME=VALUE, for warmups and canaries; may be repeated."),
    ] = None,
    cuda: Annotated[str, typer.Option(help="CUDA version: cu130, 13.0, or auto.")] = "auto",
    arch: Annotated[str, typer.Option(help="CPU architecture, or auto.")] = "auto",
    sm: Annotated[str, typer.Option(help="GPU architecture: sm90a, none, or auto.")] = "auto",
    modules: Annotated[str, typer.Option(help="Comma-separated module names, or all.")] = "all",
    groups: Annotated[
        list[str] | None, typer.Option("--group", help="Also a module group; may be repeated.")
    ] = None,
    cache: CacheOption = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            help="What the cache's blobs may take, as 200GiB; old bundles go.", show_default="no limit"
        ),
    ] = None,
    allow_incomplete: Annotated[
        bool, typer.Option("--allow-incomplete", help="Take a bundle though pinned wheels are missing.")
    ] = False,
    smoke_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that one smoke check may take.")
    ] = 120.0,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            help="A file that exists while the desired bundle is synced and smoked.",
            show_default="agent/ready in the cache",
        ),
    ] = None,
    metrics_file: Annotated[
        Path | None, typer.Option(help="Write Prometheus figures there, for the textfile collector (*.prom).")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End when the node is as the depot wants it.")] = False,
) -> None:
    """Register this node, then keep it as the depot wants it: sync, smoke what changed, report, heartbeat.

    Goes on with what it has while the server is away. Ends on SIGTERM and SIGINT with status 0; with 78 when
    the depot refuses the token and there is no --token-file to wait for another.
    """
    import logging
    import sys
    from importlib.metadata import version

    from kernel_depot.agent.errors import TokenRejected
    from kernel_depot.agent.loop import Agent, Config
    from kernel_depot.cli.render import show_failure
    from kernel_depot.platform import Platform
    from kernel_depot.smoke.cases import Host, Limits
    from kernel_depot.worker.cache import Cache
    from kernel_depot.worker.client import Endpoint
    from kernel_depot.worker.facts import find_platform, gather_facts
    from kernel_depot.worker.sync import SyncRequest

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    facts = gather_facts()
    platform: Platform = find_platform(cuda=cuda, arch=arch, sm=sm)
    first = facts.gpus[0] if facts.gpus else None
    place = Cache(cache or default_cache())
    limit = read_size(capacity) if capacity is not None else None
    chosen = None if modules == "all" else tuple(_words(modules))

    def read_token() -> str | None:
        try:
            return token_file.read_text(encoding="utf-8").strip() or None if token_file else token
        except OSError:
            return None

    config = Config(
        name=name or socket.gethostname(),
        endpoint=Endpoint(server, token=read_token()),
        cache=place,
        platform=platform,
        facts={
            "cuda": str(platform.cuda),
            "arch": str(platform.arch),
            "sm": str(platform.sm) if platform.sm else None,
            "labels": _labels(label or []),
            "gpus": [gpu.name for gpu in facts.gpus],
            "driver": facts.driver,
            "glibc": facts.glibc,
            "capacity_bytes": limit,
            "product": version("kernel-depot"),
            "modules": list(chosen) if chosen is not None else None,
            "groups": list(groups or ()),
        },
        host=Host(platform.arch, first.sm if first else None, first.name if first else None),
        driver=facts.driver,
        request=SyncRequest(modules=chosen, groups=tuple(groups or ()), allow_incomplete=allow_incomplete),
        limits=Limits(timeout=smoke_timeout, jobs=min(8, len(os.sched_getaffinity(0)))),
        capacity=limit,
        ready_file=ready_file or place.root / "agent" / "ready",
        metrics_file=metrics_file,
        token=read_token if token_file is not None else None,
    )
    running = Agent(config)

    def end(*_: object) -> None:
        running.stop.set()
        if running.waiting:  # a long poll would go on for half a minute
            sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        running.run(once=once)
    except TokenRejected as refusal:
        show_failure(refusal, as_json=False, debug=False)
        sys.exit(NO_TOKEN)


def read_size(text: str) -> int:
    """Read a size as 200GiB, 1.5TB or bytes. Raise typer.BadParameter."""
    import re

    units = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write 200GiB, 1.5TB or bytes")
    base = 1024 if match[3] or not match[2] else 1000
    return int(float(match[1]) * base ** units[match[2]])


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _labels(words: list[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (equals and name and value):
            raise typer.BadParameter(f"{word!r} is not NAME=VALUE", param_hint="--label")
        found[name] = value
    return found
