"""What a fleet of simulated nodes costs one server, and how soon it knows of an activation.

    python benchmarks/fleet.py [--nodes 100,300,1000,3000] [--steady SECONDS] [--database-url URL]

The nodes are connections of one other process that speaks plain HTTP: each registers, reports, long-polls as
the agent does, and after the activation reports, reads the new bundle's manifest, fetches the blobs it lacks
in one stream (discarding the bodies), brings a smoke result and reports itself ready. Meanwhile one caller
asks `GET /v1/resolve` twenty times a second. The catalog is SQLite unless `--database-url` names a PostgreSQL
database, whose tables are made. `--json` prints a line of JSON for each size; `--check` exits 1 beyond a
goal, which are for 1,000 nodes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

GOALS = {"steady_core_share": 0.2, "all_know_seconds": 10.0, "resolve_p99_ms": 50.0}
COMMAND = [sys.executable, "-m", "kernel_depot.cli.main"]
ARCH = os.uname().machine
MODULES = 8
WAIT = (20.0, 30.0)
HEARTBEAT = 60.0
SOURCE = """
void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message);
int __tvm_ffi_run(void* self, const void* args, int count, void* result) {
  TVMFFIErrorSetRaisedFromCStr("TypeError", "Expected: run() -> void, build %s");
  return -1;
}
"""


@dataclass(frozen=True)
class Figures:
    """What one size of fleet measured. Shares are of one core; times of `resolve` in milliseconds."""

    nodes: int
    steady_polls: int
    steady_core_share: float
    all_know_seconds: float
    half_know_seconds: float
    all_ready_seconds: float
    resolve_p50_ms: float
    resolve_p99_ms: float
    resolve_calls: int
    requests: int
    busy_core_share: float
    memory_mib: float


class Connection:
    """One kept connection to the server; answers are read whole, and their bodies returned."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._address = (host, port)
        self._head = f"Host: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(
        self, method: str, path: str, body: Any = None, *, tag: str | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send one request; return status, headers and body. The server may have closed the connection."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        content = json.dumps(body).encode() if body is not None else b""
        head = f"{method} {path} HTTP/1.1\r\n{self._head}"
        if tag is not None:
            head += f"If-None-Match: {tag}\r\n"
        if content:
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        reader, writer = self._streams
        try:
            writer.write(head.encode() + b"\r\n" + content)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            self.close()
            return await self.ask(method, path, body, tag=tag)
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        length = int(headers.get("content-length", 0))
        status = int(lines[0].split()[1])
        answer = await reader.readexactly(length) if length and status != 304 else b""
        return status, headers, answer

    def close(self) -> None:
        """Close it."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Nodes:
    """The simulated fleet."""

    def __init__(self, host: str, port: int, token: str, count: int) -> None:
        self.names = [f"node-{number:05}" for number in range(count)]
        self.polls = 0
        self.requests = 0
        self.knew: dict[str, float] = {}
        self.ready: dict[str, float] = {}
        self.settled = asyncio.Event()
        self._host, self._port, self._token = host, port, token
        self._dice = random.Random(7)
        self._first = 0

    async def live(self, name: str) -> None:
        """Be one node, until cancelled."""
        connection = Connection(self._host, self._port, self._token)
        await asyncio.sleep(self._dice.random() * len(self.names) / 100)
        await self._say(connection, "PUT", f"/v1/nodes/{name}", FACTS)
        status, headers, body = await connection.ask("GET", f"/v1/nodes/{name}/desired")
        require(status == 200, body)
        tag, bundle = headers["etag"], json.loads(body)["bundle"]
        held: set[str] = set()
        await self._become(connection, name, bundle, held)
        told = time.monotonic() - self._dice.random() * HEARTBEAT
        self._first += 1
        if self._first == len(self.names):
            self.settled.set()
        while True:
            wait = self._dice.uniform(*WAIT)
            status, headers, body = await connection.ask(
                "GET", f"/v1/nodes/{name}/desired?wait={wait:.1f}", tag=tag
            )
            self.polls += 1
            self.requests += 1
            if status == 200:
                tag, fresh = headers["etag"], json.loads(body)["bundle"]
                if fresh != bundle:
                    self.knew[name] = time.monotonic()
                    await asyncio.sleep(self._dice.uniform(0.0, float(headers.get("kernel-depot-spread", 0))))
                    bundle = fresh
                    await self._become(connection, name, bundle, held)
                    self.ready[name] = told = time.monotonic()
            else:
                require(status == 304, body)
            if time.monotonic() - told > HEARTBEAT:
                await self._say(
                    connection, "POST", f"/v1/nodes/{name}/report", {"state": "ready", "bundle": bundle}
                )
                told = time.monotonic()

    async def _become(self, connection: Connection, name: str, bundle: str, held: set[str]) -> None:
        report = f"/v1/nodes/{name}/report"
        await self._say(connection, "POST", report, {"state": "syncing", "bundle": bundle})
        status, _, body = await connection.ask("GET", f"/v1/bundles/{bundle}")
        require(status == 200, body)
        artifacts = json.loads(body)["artifacts"]
        size = 0
        lacking = list(dict.fromkeys(item["sha256"] for item in artifacts if item["sha256"] not in held))
        if lacking:
            status, _, content = await connection.ask("POST", "/v1/blobs/stream", {"sha256": lacking})
            require(status == 200, content[:500])
            size += len(content)
            self.requests += 1
            held.update(lacking)
        results = [
            {"module": artifact["module"], "sha256": artifact["sha256"], "outcome": "pass"}
            for artifact in artifacts
            if artifact["kind"] == "module"
        ]
        smoke = {"bundle": bundle, "gpu": "simulated", "driver": "580.1", "results": results}
        await self._say(connection, "POST", f"/v1/nodes/{name}/smoke", smoke)
        await self._say(connection, "POST", report, {"state": "ready", "bundle": bundle, "bytes": size})
        self.requests += 1

    async def _say(self, connection: Connection, method: str, path: str, body: Any) -> None:
        status, _, answer = await connection.ask(method, path, body)
        self.requests += 1
        require(status < 300, answer)


FACTS = {
    "cuda": "cu130",
    "arch": ARCH,
    "sm": "sm90a",
    "labels": {"pool": "simulated"},
    "gpus": ["NVIDIA H200"],
    "driver": "580.1",
    "glibc": "2.39",
    "capacity_bytes": 64_000_000_000,
    "product": "0.1.0",
}


def require(condition: bool, found: object) -> None:
    """Stop at an answer that is not as it should be."""
    if not condition:
        raise SystemExit(f"unexpected answer: {found!r:.3000}")


async def probe(connection: Connection, times: list[float]) -> None:
    """Ask for the bundle of a platform twenty times a second, until cancelled."""
    while True:
        started = time.perf_counter()
        status, _, body = await connection.ask("GET", f"/v1/resolve?cuda=cu130&arch={ARCH}&sm=sm90a")
        require(status == 200, body)
        times.append((time.perf_counter() - started) * 1e3)
        await asyncio.sleep(0.05)


async def measure(
    address: tuple[str, int], token: str, server: psutil.Process, count: int, steady: float, revision: str
) -> Figures:
    """Let nodes live, wait until all are calm, measure the calm and then an activation."""
    nodes = Nodes(*address, token, count)
    lives = [asyncio.create_task(nodes.live(name)) for name in nodes.names]
    settled = asyncio.create_task(nodes.settled.wait())
    done, _ = await asyncio.wait([settled, *lives], return_when=asyncio.FIRST_COMPLETED)
    if settled not in done:
        next(iter(done)).result()
    await asyncio.sleep(3)
    polls, before, started = nodes.polls, spent(server), time.monotonic()
    await asyncio.sleep(steady)
    share = (spent(server) - before) / (time.monotonic() - started)
    polls = nodes.polls - polls
    admin, asker = (Connection(*address, token) for _ in range(2))
    times: list[float] = []
    probing = asyncio.create_task(probe(asker, times))
    requests, before, begun = nodes.requests, spent(server), time.monotonic()
    status, _, body = await admin.ask("POST", "/v1/pins/simulated/activate", {"revision": revision})
    require(status == 200, body)
    activated = time.monotonic()
    while len(nodes.ready) < count:
        await asyncio.sleep(0.1)
        for life in lives:
            if life.done():
                life.result()
    ended = time.monotonic()
    busy = (spent(server) - before) / (ended - begun)
    probing.cancel()
    for life in lives:
        life.cancel()
    await asyncio.gather(probing, *lives, return_exceptions=True)
    learned = sorted(moment - activated for moment in nodes.knew.values())
    times.sort()
    return Figures(
        nodes=count,
        steady_polls=polls,
        steady_core_share=round(share, 4),
        all_know_seconds=round(learned[-1], 2),
        half_know_seconds=round(learned[len(learned) // 2], 2),
        all_ready_seconds=round(ended - activated, 2),
        resolve_p50_ms=round(times[len(times) // 2], 1),
        resolve_p99_ms=round(times[min(len(times) - 1, int(len(times) * 0.99))], 1),
        resolve_calls=len(times),
        requests=nodes.requests - requests,
        busy_core_share=round(busy, 2),
        memory_mib=round(server.memory_info().rss / 2**20, 1),
    )


def spent(process: psutil.Process) -> float:
    """Return the processor seconds of a process."""
    used = process.cpu_times()
    return float(used.user + used.system)


def make_pins(folder: Path, version: str) -> Path:
    """Write a pin set of one wheel of small kernel modules, compiled here, and one of libtvm_ffi.so."""
    import tvm_ffi

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("no C compiler to make modules with")
    source, target = folder / "module.c", folder / "module.so"
    modules = {}
    for number in range(MODULES):
        source.write_text(SOURCE % f"{version}.{number}")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", target, source], check=True)
        name = f"simulated_{number}"
        modules[f"flashinfer_jit_cache/jit_cache/{name}/{name}.so"] = target.read_bytes()
    runtime = Path(next(iter(tvm_ffi.__path__)), "lib", "libtvm_ffi.so").read_bytes()
    wheels = [
        write_wheel(folder, "flashinfer_jit_cache", version, modules),
        write_wheel(folder, "apache_tvm_ffi", "0.1.3", {"tvm_ffi/lib/libtvm_ffi.so": runtime}),
    ]
    pins = folder / f"simulated-{version}.toml"
    pins.write_text(
        "".join(
            f'[{wheel.name.split("-")[0]}.cu130.{ARCH}]\nfilename = "{wheel.name}"\n'
            f'url = "{wheel.as_uri()}"\nsha256 = "{hashlib.sha256(wheel.read_bytes()).hexdigest()}"\n\n'
            for wheel in wheels
        )
    )
    return pins


def write_wheel(folder: Path, project: str, version: str, files: dict[str, bytes]) -> Path:
    """Write a wheel with RECORD."""
    info = f"{project}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
    tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n"
    members = {**files, f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": tag.encode()}
    rows = [
        f"{name},sha256={urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in members.items()
    ]
    members[f"{info}/RECORD"] = ("".join(rows) + f"{info}/RECORD,,\n").encode()
    path = folder / f"{project}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # the same bytes each time
    return path


@contextmanager
def running(data_dir: Path, database_url: str | None) -> Iterator[tuple[psutil.Process, tuple[str, int]]]:
    """Run `kernel-depot serve`; yield its process and address."""
    command = [*COMMAND, "serve", "--data-dir", str(data_dir), "--port", "0", "--allow-file-urls"]
    command += ["--database-url", database_url] if database_url else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://([^:]+):(\d+)", process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        yield psutil.Process(process.pid), (found[1], int(found[2]))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def run(*words: object) -> str:
    """Run a command of the product."""
    return subprocess.run([*COMMAND, *map(str, words)], check=True, capture_output=True, text=True).stdout


async def prepare(address: tuple[str, int], token: str, texts: list[str]) -> list[str]:
    """Record both revisions and bring their wheels in; the first is current. Return their digests."""
    connection = Connection(*address, token)
    digests = []
    for number, text in enumerate(texts):
        path = f"/v1/pins?name=simulated&propose={'true' if number else 'false'}&why=benchmark"
        status, _, body = await connection.ask("POST", path, parsed(text))
        require(status in (200, 201), body)
        digests.append(json.loads(body)["revision"])
        status, _, body = await connection.ask("POST", "/v1/materialize", {"revisions": [digests[-1]]})
        require(status == 202, body)
        job = json.loads(body)["id"]
        while json.loads(body).get("state") not in ("succeeded", "failed"):
            await asyncio.sleep(0.2)
            _, _, body = await connection.ask("GET", f"/v1/jobs/{job}")
        require(json.loads(body)["state"] == "succeeded", body)
    connection.close()
    return digests


def parsed(text: str) -> dict[str, Any]:
    """Return what a pin set's TOML says."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def one_size(count: int, steady: float, database_url: str | None) -> Figures:
    """Measure a fleet of `count` nodes on a server and a catalog of its own."""
    with tempfile.TemporaryDirectory(prefix="fleet-") as name:
        folder = Path(name)
        texts = [make_pins(folder, version).read_text() for version in ("1.0", "1.1")]
        more = ["--database-url", database_url] if database_url else []
        run("db", "upgrade", "--data-dir", folder / "depot", *more)
        made = run(
            "tokens", "create", "--scope", "admin",
            "--name", f"benchmark-{os.getpid()}-{count}", "--data-dir", folder / "depot", "--json", *more,
        )  # fmt: skip
        token = json.loads(made)["secret"]
        with running(folder / "depot", database_url) as (server, address):
            digests = asyncio.run(prepare(address, token, texts))
            return asyncio.run(measure(address, token, server, count, steady, digests[1]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", default="100,300,1000,3000")
    parser.add_argument("--steady", type=float, default=45.0, help="seconds of calm that are measured")
    parser.add_argument("--database-url")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit 1 beyond a goal")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = []
    for word in arguments.nodes.split(","):
        figures = one_size(int(word), arguments.steady, arguments.database_url)
        found.append(asdict(figures))
        if arguments.json:
            print(json.dumps(found[-1]), flush=True)
            continue
        if len(found) == 1:
            print(" | ".join(found[-1]))
        print(" | ".join(str(value) for value in found[-1].values()), flush=True)
    bad = [row for row in found if row["nodes"] <= 1000 and any(row[key] > GOALS[key] for key in GOALS)]
    if arguments.check and bad:
        sys.exit(1)


if __name__ == "__main__":
    main()
