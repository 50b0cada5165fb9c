"""PostgreSQL, S3, three replicas and real agents: a warmup ends well though replicas die by `kill -9`.

The number of agents is KERNEL_DEPOT_TEST_AGENTS, 20 by default.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from kernel_depot.catalog.database import open_database, upgrade

COMMAND = [sys.executable, "-m", "kernel_depot.cli.main"]
AGENTS = int(os.environ.get("KERNEL_DEPOT_TEST_AGENTS", "20"))
REPLICAS = 3
KILLS = 4


class Upstream(SimpleHTTPRequestHandler):
    """Serves wheels; a directory's listing is an index page. Counts how often each wheel is asked for."""

    asked: Counter[str]

    def do_GET(self) -> None:
        if self.path.endswith(".whl"):
            self.asked[self.path.rpartition("/")[2]] += 1
        super().do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[tuple[str, Path, Counter[str]]]:
    """An index of wheels on this machine: its URL, its directory and the count of GETs by file."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    asked: Counter[str] = Counter()
    handler = type("Handler", (Upstream,), {"asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", folder, asked
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass
class Cluster:
    """Replicas on ports of their own, over one catalog and one store."""

    folder: Path
    environment: dict[str, str]
    ports: list[int]
    replicas: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, number: int) -> None:
        """Start a replica and wait until it listens."""
        log = (self.folder / f"replica-{number}.log").open("ab")
        words = ["serve", "--data-dir", self.folder / f"replica-{number}", "--port", self.ports[number]]
        process = subprocess.Popen(
            [*COMMAND, *map(str, words), "--allow-anonymous"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **self.environment, "KERNEL_DEPOT_REPLICA": f"replica-{number}"},
        )
        log.close()
        self.replicas[number] = process
        assert process.stdout is not None
        line = process.stdout.readline()
        assert re.search(r"http://\S+", line), (self.folder / f"replica-{number}.log").read_text()[-3000:]

    def kill(self, number: int) -> None:
        """Kill a replica without a warning."""
        process = self.replicas.pop(number)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.ports[number]}"

    def ask(self, method: str, path: str, *, replica: int | None = None, **request: Any) -> Any:
        """Ask one replica, or whichever answers."""
        numbers = [replica] if replica is not None else list(self.replicas)
        for number in numbers:
            try:
                answer = httpx.request(
                    method, self.url(number) + path, timeout=30, trust_env=False, **request
                )
            except httpx.TransportError:
                continue
            assert answer.is_success, answer.text
            return answer.json() if answer.content else None
        return None

    def close(self) -> None:
        for number in list(self.replicas):
            self.kill(number)


@pytest.fixture
def cluster(
    tmp_path: Path, postgres_url: str, s3_url: str, upstream: tuple[str, Path, Counter[str]]
) -> Iterator[Cluster]:
    """Three replicas with nothing pinned yet."""
    engine = open_database(postgres_url)
    upgrade(engine)
    engine.dispose()
    environment = {
        "KERNEL_DEPOT_DATABASE_URL": postgres_url,
        "KERNEL_DEPOT_STORE_URL": s3_url,
        "KERNEL_DEPOT_INDEX_NEAR": upstream[0],
        "KERNEL_DEPOT_ALLOW_HTTP": "true",
        "KERNEL_DEPOT_ALLOW_PRIVATE_ADDRESSES": "true",
        "KERNEL_DEPOT_LEASE_SECONDS": "10",
    }
    made = Cluster(tmp_path, environment, free_ports(REPLICAS))
    try:
        for number in range(REPLICAS):
            made.start(number)
        yield made
    finally:
        made.close()


def free_ports(count: int) -> list[int]:
    """Return ports that the kernel gives to no outgoing connection, so that a replica can come back."""
    import socket

    outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.sample(range(10000, outgoing), outgoing - 10000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            break
    return found


class Chaos(Thread):
    """Kills replicas one after another, at moments and in an order of a seed, and replaces each."""

    def __init__(self, cluster: Cluster, *, seed: int) -> None:
        super().__init__(name="chaos")
        self._cluster, self._random = cluster, random.Random(seed)
        self.done = Event()
        self.killed: list[int] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Kill until told to stop, but at least as often as was promised."""
        try:
            while len(self.killed) < KILLS:
                self.done.wait(self._random.uniform(0.2, 2.0))
                number = self._random.randrange(REPLICAS)
                self._cluster.kill(number)
                self.killed.append(number)
                time.sleep(self._random.uniform(0.0, 1.0))
                self._cluster.start(number)
        except BaseException as error:
            self.failure = error


def damaged(cache: Path) -> list[str]:
    """Return the blobs of a node's cache that are not what their names say."""
    blobs = [path for path in (cache / "blobs" / "sha256").rglob("*") if path.is_file()]
    assert blobs
    return [path.name for path in blobs if hashlib.sha256(path.read_bytes()).hexdigest() != path.name]


def pin(wheel: Path) -> str:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return (
        f"[{wheel.name.split('-')[0]}.cu130.{os.uname().machine}]\n"
        f'filename = "{wheel.name}"\nindex = "near"\nsha256 = "{digest}"\n\n'
    )


def test_a_warmup_survives_the_deaths_of_replicas(
    cluster: Cluster,
    upstream: tuple[str, Path, Counter[str]],
    make_wheel: Callable[..., Path],
    wait_for: Callable[..., Any],
    tmp_path: Path,
) -> None:
    _, folder, asked = upstream
    files = {f"flashinfer_cubin/cubins/{n:03}/checksums.txt": os.urandom(50_000) for n in range(20)}
    wheels = [
        make_wheel(files, directory=folder / "flashinfer-cubin"),
        make_wheel(
            {"flashinfer/data/readme.txt": os.urandom(2000)},
            project="flashinfer_python",
            directory=folder / "flashinfer-python",
        ),
    ]
    toml = "".join(pin(wheel) for wheel in wheels)
    made = cluster.ask(
        "POST",
        "/v1/pins",
        params={"name": "kernels", "propose": "true"},
        content=toml,
        headers={"content-type": "application/toml"},
    )
    revision = made["revision"]
    agents: list[subprocess.Popen[bytes]] = []
    names = [f"node-{number:02}" for number in range(AGENTS)]
    try:
        for number, name in enumerate(names):
            words = ["agent", "--server", cluster.url(number % REPLICAS), "--name", name]
            words += ["--cache", str(tmp_path / name), "--cuda", "cu130", "--sm", "none"]
            with (tmp_path / f"{name}.log").open("wb") as log:
                agents.append(subprocess.Popen([*COMMAND, *words], stdout=log, stderr=log))
            wait_for(
                lambda name=name: any(
                    node["name"] == name for node in cluster.ask("GET", "/v1/nodes")["nodes"]
                )
            )
        # Three admins ask three replicas at once; the store is filled once.
        body = {"revisions": [revision]}
        jobs = [
            cluster.ask("POST", "/v1/materialize", replica=number, json=body)["id"]
            for number in range(REPLICAS)
        ]
        order = {"revisions": [revision], "max_parallel": max(2, AGENTS // 5), "deadline_seconds": 900}
        warmup = cluster.ask("POST", "/v1/warmups", json=order)["id"]
        wait_for(lambda: cluster.ask("GET", f"/v1/warmups/{warmup}")["state"] != "filling", seconds=120)
        chaos = Chaos(cluster, seed=6)
        chaos.start()
        try:
            ended = wait_for(
                lambda: (
                    facts
                    if (facts := cluster.ask("GET", f"/v1/warmups/{warmup}"))
                    and facts["state"] in ("succeeded", "failed", "paused")
                    else None
                ),
                seconds=600,
            )
        finally:
            chaos.done.set()
            chaos.join()
        assert chaos.failure is None
        assert len(chaos.killed) == KILLS
        assert ended["state"] == "succeeded", json.dumps(ended, indent=1)
        assert {node["node"]: node["state"] for node in ended["nodes"]} == dict.fromkeys(names, "done")
        assert asked == Counter({wheel.name: 1 for wheel in wheels})
        assert {wait_for(lambda job=job: settled(cluster, job), seconds=120) for job in jobs} == {"succeeded"}
        assert asked == Counter({wheel.name: 1 for wheel in wheels})
        (bundle,) = {node["bundle"] for node in ended["nodes"]}
        manifest = json.loads((tmp_path / names[0] / "bundles" / f"{bundle}.json").read_text())
        wanted = {artifact["sha256"] for artifact in manifest["artifacts"]}
        assert len(wanted) > 20
        for name in names:
            assert damaged(tmp_path / name) == []
            assert wanted <= {path.name for path in (tmp_path / name / "blobs" / "sha256").rglob("*")}
        # Every byte is there already, so that what was warmed is current everywhere without a fetch.
        cluster.ask("POST", "/v1/pins/kernels/activate", json={"revision": revision})

        def current() -> bool:
            nodes = cluster.ask("GET", "/v1/nodes")["nodes"]
            return all((node["state"], node["bundle"]) == ("ready", bundle) for node in nodes)

        wait_for(current, seconds=240)
        assert {node["bytes"] for node in cluster.ask("GET", "/v1/nodes")["nodes"]} == {0}
        assert {(tmp_path / name / "current").readlink().name for name in names} == {bundle}
    finally:
        for process in agents:
            process.kill()
            process.wait()


def settled(cluster: Cluster, job: str) -> str | None:
    state = cluster.ask("GET", f"/v1/jobs/{job}")["state"]
    return str(state) if state in ("succeeded", "failed") else None
