"""`kernel-depot serve`: the HTTP service in this process."""

from __future__ import annotations

import gc
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from kernel_depot.errors import DepotError

_THREADS: Final = 16
"""More at once would only keep each other, and the event loop, from the interpreter."""

app = typer.Typer()


class AddressUnavailable(DepotError):
    """The address to listen on is taken, or is not this machine's."""

    slug = "address-unavailable"
    title = "The address cannot be listened on"
    status = 503


@app.command()
def serve(
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the embedded catalog and store lie; ./.depot by default.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8780,
    database_url: Annotated[
        str | None, typer.Option(help="A PostgreSQL URL, in place of the embedded SQLite catalog.")
    ] = None,
    store_url: Annotated[str | None, typer.Option(help="s3://BUCKET/PREFIX, or another directory.")] = None,
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="Let callers on this machine in without a token.")
    ] = False,
    allow_file_urls: Annotated[
        bool, typer.Option("--allow-file-urls", help="Accept pins whose url is a local file.")
    ] = False,
) -> None:
    """Serve the catalog and the blobs over HTTP until told to stop (SIGTERM, SIGINT).

    Prints one line with the URL once requests are answered.
    """
    listener = _listen(host, port)
    with listener:
        _run(
            listener,
            {
                "data_dir": data_dir,
                "database_url": database_url,
                "store_url": store_url,
                "allow_anonymous": allow_anonymous or None,
                "allow_file_urls": allow_file_urls or None,
            },
        )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise AddressUnavailable(
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            where=f"{host}:{port}",
            remedy="stop what listens there, or choose another with --port (0 takes a free one)",
        ) from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _run(listener: socket.socket, given: dict[str, object]) -> None:
    import logging

    import uvicorn
    from anyio.to_thread import current_default_thread_limiter

    from kernel_depot.api.app import create_app
    from kernel_depot.fleet.driver import WarmupDriver
    from kernel_depot.jobs.depot import open_depot
    from kernel_depot.jobs.engine import start_engine
    from kernel_depot.settings import load_settings

    class Announcing(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            current_default_thread_limiter().total_tokens = _THREADS
            await super().startup(sockets=sockets)
            if self.started:
                print(f"kernel-depot is listening on {_url(listener)}", flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            application.state.watch.close()
            await super().shutdown(sockets=sockets)

    sys.setswitchinterval(0.001)  # the event loop is one of many threads
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    depot = open_depot(load_settings(**given))
    # uvicorn raises the signal again once it has shut down; without handlers that would skip what follows.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    application = create_app(depot)
    config = uvicorn.Config(
        application,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=20,
    )
    try:
        engine = start_engine(depot)
        application.openapi()  # made at the first request otherwise, which waits a second for it
        gc.collect()
        gc.freeze()  # what stays for ever is not looked through again
        gc.set_threshold(20_000, 20, 20)
        try:
            with WarmupDriver(depot.engine):
                Announcing(config).run(sockets=[listener])
        finally:
            engine.close()
    finally:
        depot.close()
