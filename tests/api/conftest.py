from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import zstandard

from kernel_depot.api.app import create_app
from kernel_depot.catalog import record
from kernel_depot.catalog.database import writing
from kernel_depot.catalog.tables import Blob
from kernel_depot.jobs.depot import Depot, open_depot
from kernel_depot.settings import load_settings
from kernel_depot.store.blobs import Form, StagedBlob


@dataclass
class Server:
    """A depot of its own, served by uvicorn on loopback in a thread."""

    depot: Depot
    url: str
    clients: list[httpx.Client] = field(default_factory=list)

    def client(self, token: str | None = None) -> httpx.Client:
        """Open a client that decodes nothing by itself."""
        headers = {"accept-encoding": "identity"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        client = httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)
        self.clients.append(client)
        return client

    def token(self, scope: str = "admin", *, expires_at: datetime | None = None) -> str:
        """Make a token and return its secret."""
        with writing(self.depot.engine) as session:
            _, secret = record.create_token(session, name=scope, scopes=[scope], expires_at=expires_at)
        return secret

    def put(self, data: bytes, *, zstd: bool = False) -> str:
        """Publish and record a blob; with its zstd form when asked for."""
        sha256 = hashlib.sha256(data).hexdigest()
        form = zstandard.compress(data, 3) if zstd else None
        with self.depot.store.staging() as staging:
            for number, (content, kept) in enumerate(((data, Form.IDENTITY), (form, Form.ZSTD))):
                if content is not None:
                    path = staging / str(number)
                    path.write_bytes(content)
                    self.depot.store.publish(StagedBlob(sha256, len(content), path), form=kept)
        row = {
            "sha256": sha256,
            "size": len(data),
            "zstd_state": "made" if form is not None else "not_worth",
            "zstd_size": len(form) if form is not None else None,
            "zstd_sha256": hashlib.sha256(form).hexdigest() if form is not None else None,
        }
        with writing(self.depot.engine) as session:
            record.insert_absent(session, Blob, [row])
        return sha256


@contextmanager
def serving(depot: Depot) -> Iterator[Server]:
    """Serve a depot until the block ends."""
    config = uvicorn.Config(
        create_app(depot), port=0, loop="uvloop", http="httptools", ws="none", lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    listener.listen()  # a client that is sooner than the thread waits, and is not refused
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    served = Server(depot, f"http://127.0.0.1:{listener.getsockname()[1]}")
    try:
        yield served
    finally:
        for client in served.clients:
            client.close()
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture
def open_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Return a function that serves a new depot with the given settings."""
    with ExitStack() as stack:

        def start(**settings: Any) -> Server:
            data_dir = Path(tempfile.mkdtemp(prefix="depot-", dir=tmp_path))
            given = {"data_dir": data_dir, "allow_anonymous": True, **settings}
            depot = open_depot(load_settings(**given))
            stack.callback(depot.close)
            return stack.enter_context(serving(depot))

        yield start


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a depot that lets callers on this machine in; shared by a file's tests."""
    depot = open_depot(load_settings(data_dir=tmp_path_factory.mktemp("depot"), allow_anonymous=True))
    with serving(depot) as server:
        yield server
    depot.close()


@pytest.fixture(scope="module")
def client(server: Server) -> httpx.Client:
    """Open a client without a token."""
    return server.client()


@pytest.fixture(scope="session")
def serve() -> Callable[[Depot], AbstractContextManager[Server]]:
    """Return the context manager that serves a depot."""
    return serving


@pytest.fixture
def run_documented() -> Callable[[str, Path, dict[str, str]], None]:
    """Return a function that runs the shell blocks of a page of docs/ in order."""
    docs = Path(__file__).parents[2] / "docs"

    def run(page: str, folder: Path, variables: dict[str, str]) -> None:
        blocks = re.findall(r"^```sh\n(.*?)^```$", (docs / page).read_text(), re.MULTILINE | re.DOTALL)
        assert blocks
        for block in blocks:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block],
                cwd=folder,
                env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", **variables},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"

    return run


@pytest.fixture
def admin(open_server: Callable[..., Any]) -> httpx.Client:
    """An administrator of an empty depot."""
    server = open_server(allow_anonymous=False)
    made: httpx.Client = server.client(server.token("admin"))
    return made
