from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kernel_depot.jobs.depot import Depot, open_depot
from kernel_depot.settings import load_settings


@pytest.fixture
def program() -> list[str]:
    """The command line program, run by this interpreter."""
    return [sys.executable, "-m", "kernel_depot.cli.main"]


def text_files(count: int, size: int = 600) -> dict[str, bytes]:
    """Artifacts without code, so that they can be anything: headers beside cubins."""
    return {
        f"flashinfer_cubin/cubins/{number:04d}/kernel.h": os.urandom(size // 2) + b"#" * (size // 2)
        for number in range(count)
    }


@dataclass
class Pinned:
    """A wheel on this machine and the pin set file that names it."""

    wheel: Path
    sha256: str
    pins: Path
    files: dict[str, bytes]

    @property
    def digests(self) -> set[str]:
        return {hashlib.sha256(content).hexdigest() for content in self.files.values()}


Pin = Callable[..., Pinned]


@pytest.fixture
def pin_files(make_wheel: Callable[..., Path], tmp_path: Path) -> Pin:
    """Build a wheel from files, or from so many of a size, and pin it."""

    def pin(
        files: dict[str, bytes] | int,
        *,
        url: str | None = None,
        sha256: str | None = None,
        size: int = 600,
        **kwargs: Any,
    ) -> Pinned:
        files = text_files(files, size) if isinstance(files, int) else files
        wheel = make_wheel(files, **kwargs)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        pins = tmp_path / f"{wheel.name.split('-')[0]}-pins.toml"
        pins.write_text(
            f"[{wheel.name.split('-')[0].replace('_', '-')}.cu130.x86_64]\n"
            f"filename = {json.dumps(wheel.name)}\n"
            f'sha256 = "{sha256 or digest}"\n'
            f"url = {json.dumps(url or wheel.as_uri())}\n"
        )
        return Pinned(wheel, digest, pins, files)

    return pin


@pytest.fixture(params=["sqlite+directory", "postgresql+s3"])
def depot(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Depot]:
    """An empty depot, embedded or on real servers."""
    urls: dict[str, str] = {}
    if request.param == "postgresql+s3":
        from kernel_depot.catalog.database import open_database, upgrade

        urls["database_url"] = request.getfixturevalue("postgres_url")
        urls["store_url"] = request.getfixturevalue("s3_url")
        engine = open_database(urls["database_url"])
        upgrade(engine)
        engine.dispose()
    opened = open_depot(load_settings(data_dir=tmp_path / "data", allow_file_urls=True, **urls))
    yield opened
    opened.close()


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Depot]:
    """An empty embedded depot."""
    opened = open_depot(load_settings(data_dir=tmp_path / "data", allow_file_urls=True))
    yield opened
    opened.close()


SERVER = """
import json, sys, time
from kernel_depot.jobs import engine
from kernel_depot.jobs.depot import open_depot
from kernel_depot.settings import load_settings
depot = open_depot(load_settings(allow_file_urls=True, replica="one", **json.loads(sys.argv[1])))
engine.start_engine(depot)
print(getattr(engine, sys.argv[2])(depot, asked_by="test"), flush=True)
time.sleep(600)
"""


@pytest.fixture
def killed_server(depot: Depot) -> Callable[..., str]:
    """Start a server that hands in a job, kill it once the job is `under_way`; give the job's id.

    `before` is what the server's program does first; `given` are settings.
    """

    def kill(submit: str, under_way: Callable[[str], object], *, before: str = "", **given: object) -> str:
        settings = depot.settings
        places = {
            "data_dir": str(settings.data_dir),
            "database_url": settings.database_url,
            "store_url": settings.store_url,
        }
        with subprocess.Popen(
            [sys.executable, "-c", before + SERVER, json.dumps({**places, **given}), submit],
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            job_id = child.stdout.readline().strip()
            under_way(job_id)
            child.kill()
        return job_id

    return kill
