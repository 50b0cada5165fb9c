"""`kernel-depot builder`: a long-lived program that builds what a depot's administrators queue."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Annotated

import typer

from kernel_depot.cli.build import default_cache, named_roots

app = typer.Typer()


@app.command()
def builder(
    server: Annotated[str, typer.Option("--server", envvar="KERNEL_DEPOT_SERVER", help="The depot's URL.")],
    token: Annotated[
        str | None, typer.Option(envvar="KERNEL_DEPOT_TOKEN", help="A bearer token with scope admin.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What the depot calls this machine.", show_default="the host's name")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compilers at a time; as many as CPUs by default.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="The builder's directory.")] = None,
    cuda_home: Annotated[
        Path | None, typer.Option(help="A CUDA toolkit to prefer; CUDA_HOME otherwise.")
    ] = None,
    poll: Annotated[float, typer.Option(min=0.1, help="Seconds between questions for work.")] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="End when no build waits.")] = False,
) -> None:
    """Claim builds from a depot, compile them, publish their wheels; until SIGTERM or SIGINT.

    Asked to end, it gives the build under way back to the queue and exits 0. Killed, it is followed by
    another builder within the depot's lease; what either compiled is not compiled again.
    """
    import logging
    import platform
    from threading import Event

    from kernel_depot.builder.cache import BuildCache
    from kernel_depot.builder.depot import Depot
    from kernel_depot.builder.station import Station, work
    from kernel_depot.builder.toolchain import buildable, candidates
    from kernel_depot.platform import Arch, CudaTag
    from kernel_depot.settings import load_settings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def roots(tag: CudaTag) -> list[Path]:
        return candidates(tag, named=named_roots(cuda_home), search_path=os.environ.get("PATH", os.defpath))

    arch = Arch.parse(platform.machine())
    everywhere = [root for tag in buildable(arch, roots=()) for root in roots(tag)]
    everywhere += sorted(Path("/usr/local").glob("cuda-*"))
    station = Station(
        name=name or socket.gethostname(),
        arch=arch,
        cuda=buildable(arch, roots=[*named_roots(cuda_home), *everywhere]),
        jobs=jobs or len(os.sched_getaffinity(0)),
        cache=BuildCache(cache or default_cache()),
        settings=load_settings(),
        roots=roots,
    )
    with Depot(server, token=token) as depot:
        print(
            f"{station.name} builds {', '.join(map(str, station.cuda))} for {arch}, asking {server}",
            flush=True,
        )
        work(station, depot, stop=stop, poll=poll, once=once)
