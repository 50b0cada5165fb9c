"""`kernel-depot demo`: the whole way of the data on one machine, with real wheels, in one table."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernel_depot.cli.render import print_json, size_text
from kernel_depot.errors import DepotError

if TYPE_CHECKING:
    import httpx

    from kernel_depot.pins.pin import PinSet
    from kernel_depot.platform import Arch, Platform
    from kernel_depot.smoke.cases import Host

app = typer.Typer()

START_SECONDS = 60.0
POLL_SECONDS = 0.2
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# The demo would rather say `unreachable` soon than wait out a network that is down.
PATIENCE = {"KERNEL_DEPOT_FETCH_ATTEMPTS": "2", "KERNEL_DEPOT_FETCH_CONNECT_TIMEOUT": "8"}
UNREACHABLE = frozenset(
    {
        "upstream-unreachable",
        "upstream-status",
        "upstream-dropped",
        "upstream-untrusted",
        "download-timeout",
        "index-unreachable",
        "proxy-unusable",
    }
)


class DemoError(DepotError):
    """The base of what can go wrong in the demo itself."""


class ServerNotStarted(DemoError):
    """The demo's server ended, or did not listen in time."""

    slug = "demo-server-not-started"
    title = "The demo's server did not start"


class ServerLost(DemoError):
    """The demo's server stopped answering."""

    slug = "demo-server-lost"
    title = "The demo's server stopped answering"


class ServerRefused(DemoError):
    """The demo's server answered a step with a problem."""

    slug = "demo-step-refused"
    title = "The server refused a step of the demo"

    def __init__(self, step: str, problem: dict[str, Any]) -> None:
        super().__init__(
            f"{step}: {problem.get('detail', problem)}",
            where=problem.get("where"),
            expected=problem.get("expected"),
            found=problem.get("found"),
            remedy=problem.get("remedy"),
            cause=problem.get("type"),
        )


class Result(str, Enum):
    """How a line of the summary ended."""

    DONE = "done"
    UNCHANGED = "unchanged"
    UNREACHABLE = "unreachable"
    SKIPPED = "skipped"
    FAILED = "failed"


COLOURS = {
    Result.DONE: "green",
    Result.UNCHANGED: "green",
    Result.UNREACHABLE: "yellow",
    Result.SKIPPED: "yellow",
    Result.FAILED: "red",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the summary; `said` is what the result column shows."""

    step: str
    subject: str
    result: Result
    said: str
    detail: str = ""


@app.command()
def demo(
    data_dir: Annotated[Path, typer.Option(help="Where everything the demo makes is kept.")] = Path(".depot"),
    pins: Annotated[
        Path | None, typer.Option(help="A pin set in place of the shipped flashinfer-0.6.3.")
    ] = None,
    all_archs: Annotated[
        bool, typer.Option("--all-archs", help="Bring in and sync both CPU archs, not just this host's.")
    ] = False,
    allow_file_urls: Annotated[
        bool, typer.Option("--allow-file-urls", help="Accept pins whose url is a local file.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 when anything was unreachable or skipped.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Show the whole way of the data on this machine: pins, wheels, store, HTTP, sync, views, smoke.

    Starts a server on a free loopback port, brings in the pinned wheels through its REST API, syncs as a
    worker into DATA_DIR/worker, loads and smokes what came, and prints one table. Run again: nothing is
    downloaded twice. Exits 1 on a failure; with --strict also when something was unreachable or skipped.
    """
    from kernel_depot.pins.document import read_pin_set
    from kernel_depot.platform import Arch
    from kernel_depot.shipped import shipped_dir
    from kernel_depot.smoke.cases import this_host

    path = pins or shipped_dir("pins") / "flashinfer-0.6.3.toml"
    pin_set = read_pin_set(path, allow_file_urls=allow_file_urls)
    host = this_host()
    others = [arch for arch in Arch if arch is not host.arch] if all_archs else []
    archs = [host.arch, *others]
    say = _quiet if as_json else _progress_line
    lines: list[Line] = []
    say("starting the server")
    with _server(data_dir, allow_file_urls=allow_file_urls) as (url, client):
        lines.append(Line("serve", url, Result.DONE, "listening", f"catalog and store in {data_dir}"))
        lines.append(_pin(client, path, pin_set))
        wheels = _materialize(client, pin_set, archs, say)
        lines += [_wheel_line(wheel) for wheel in wheels]
        for arch in archs:
            say(f"sync and smoke: {arch}")
            lines += _work(url, client, data_dir, pin_set, arch, host)
    say("")
    downloaded = sum(wheel.get("downloaded") or 0 for wheel in wheels)
    if as_json:
        print_json({"lines": [_as_json(line) for line in lines], "downloaded": downloaded})
    else:
        _print(lines, downloaded)
    bad = {Result.FAILED} | ({Result.UNREACHABLE, Result.SKIPPED} if strict else set())
    if any(line.result in bad for line in lines):
        raise typer.Exit(1)


@contextmanager
def _server(data_dir: Path, *, allow_file_urls: bool) -> Iterator[tuple[str, httpx.Client]]:
    """Run `kernel-depot serve` as a child on a free port; its log goes to DATA_DIR/serve.log."""
    import httpx

    data_dir.mkdir(parents=True, exist_ok=True)
    log_path = data_dir / "serve.log"
    command = [sys.executable, "-m", "kernel_depot.cli.main", "serve", "--data-dir", str(data_dir)]
    command += ["--port", "0", "--allow-anonymous"] + (["--allow-file-urls"] if allow_file_urls else [])
    libc = ctypes.CDLL(None, use_errno=True)

    def end_with_the_demo() -> None:
        """Have the kernel stop the server when the demo is killed and cannot (prctl(2))."""
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    with log_path.open("ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**PATIENCE, **os.environ},
            text=True,
            preexec_fn=end_with_the_demo,
            start_new_session=True,  # Ctrl-C reaches the demo alone, which then stops its server
        )
    try:
        url = _listening(child, log_path)
        with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client:
            yield url, client
    finally:
        _stop(child)


def _listening(child: subprocess.Popen[str], log_path: Path) -> str:
    """Wait for the line that carries the server's URL."""
    output = child.stdout
    assert output is not None
    watchdog = threading.Timer(START_SECONDS, child.kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        for line in output:
            word = line.split()[-1] if line.split() else ""
            if word.startswith("http://"):
                return word
    finally:
        watchdog.cancel()
    tail = log_path.read_text(errors="replace").splitlines()[-8:]
    raise ServerNotStarted(
        "the server ended before it listened",
        where=str(log_path),
        found="\n    ".join(tail) or f"exit status {child.wait()}",
        remedy=f"run `kernel-depot serve --data-dir {log_path.parent}` to see it fail",
    )


def _stop(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _ask(client: httpx.Client, step: str, method: str, path: str, **request: Any) -> Any:
    import httpx

    try:
        response = client.request(method, path, **request)
    except httpx.TransportError as error:
        raise ServerLost(
            f"{step}: {error}",
            where=f"{client.base_url.join(path)}",
            remedy="look at serve.log in the data directory, then run the demo again: it goes on from there",
        ) from error
    if response.is_error:
        try:
            problem = response.json()
        except ValueError:
            problem = {"detail": f"HTTP {response.status_code}"}
        raise ServerRefused(step, problem)
    return response.json(), response.status_code


def _pin(client: httpx.Client, path: Path, pin_set: PinSet) -> Line:
    document, status = _ask(
        client,
        "pins",
        "POST",
        "/v1/pins",
        params={"name": pin_set.name},
        content=pin_set.text.encode() if path.name != "Cargo.toml" else _as_toml(pin_set),
        headers={"content-type": "application/toml"},
    )
    detail = f"{len(pin_set.pins)} pins, revision {document['revision'][:12]}"
    if status == 201:
        return Line("pins", pin_set.name, Result.DONE, "recorded", detail)
    return Line("pins", pin_set.name, Result.UNCHANGED, "already current", detail)


def _as_toml(pin_set: PinSet) -> bytes:
    """Write a pin set read from another document as the TOML that the API takes."""
    import tomlkit

    tables: dict[str, Any] = {}
    for pin in pin_set.pins:
        facts = pin.to_json()
        project, cuda, arch = (str(facts.pop(key)) for key in ("project", "cuda", "arch"))
        facts.pop("version")
        tables.setdefault(project, {}).setdefault(cuda, {})[arch] = facts
    return tomlkit.dumps(tables).encode()


def _materialize(client: httpx.Client, pin_set: PinSet, archs: list[Arch], say: Any) -> list[dict[str, Any]]:
    """Order a materialize job and follow it to its end; return what became of each wheel."""
    request = {"pins": [pin_set.name], "arch": [str(arch) for arch in archs]}
    job, _ = _ask(client, "materialize", "POST", "/v1/materialize", json=request)
    while job["state"] in ("queued", "running"):
        progress = job["progress"]
        total = progress["bytes_total"]
        of_total = f" of {size_text(total)}" if total else ""
        say(
            f"materialize: {job['state']}, {size_text(progress['bytes_done'])}{of_total}, "
            f"{progress['members_done']} members"
        )
        time.sleep(POLL_SECONDS)
        job, _ = _ask(client, "materialize", "GET", f"/v1/jobs/{job['id']}")
    say("")
    wheels: list[dict[str, Any]] = job["wheels"]
    if not wheels and job["problem"] is not None:
        raise ServerRefused("materialize", job["problem"])
    return wheels


def _wheel_line(wheel: dict[str, Any]) -> Line:
    outcome = wheel.get("outcome")
    filename = str(wheel["filename"])
    if outcome == "ingested":
        detail = (
            f"{size_text(wheel['downloaded'])} downloaded, sha256 {wheel['sha256'][:12]} verified, "
            f"{wheel['member_count']} members, {wheel['seconds']:.1f} s"
        )
        return Line("wheel", filename, Result.DONE, "brought in", detail)
    if outcome == "already-there":
        return Line("wheel", filename, Result.UNCHANGED, "already there", "nothing downloaded")
    problem = wheel.get("problem") or {}
    slug = str(problem.get("type", "")).rsplit(":", 1)[-1]
    detail = str(problem.get("detail", outcome or "no outcome"))
    if slug in UNREACHABLE:
        return Line("wheel", filename, Result.UNREACHABLE, "unreachable", detail)
    return Line("wheel", filename, Result.FAILED, f"failed: {slug}", detail)


def _work(
    url: str, client: httpx.Client, data_dir: Path, pin_set: PinSet, arch: Arch, host: Host
) -> list[Line]:
    """Be a worker of `arch`: resolve, sync, and smoke what this host can run."""
    from kernel_depot.smoke.cases import smoke
    from kernel_depot.worker.cache import Cache
    from kernel_depot.worker.client import Endpoint
    from kernel_depot.worker.sync import SyncRequest, sync

    platform = _platform(pin_set, arch, host)
    lines = [_resolve(client, pin_set, platform)]
    if lines[0].result is Result.SKIPPED:
        return lines
    cache = Cache(data_dir / ("worker" if arch is host.arch else f"worker-{arch}"))
    request = SyncRequest(pins=(pin_set.name,), allow_incomplete=True)
    report = sync(request, endpoint=Endpoint(url, trust_env=False), platform=platform, cache=cache)
    if report.fetched_blobs:
        said, result = "synced", Result.DONE
        detail = (
            f"{report.fetched_blobs} blobs, {size_text(report.fetched_bytes)} verified, "
            f"{size_text(report.wire_bytes)} on the wire, bundle {report.digest[:12]}"
        )
    else:
        said, result = "nothing new", Result.UNCHANGED
        detail = f"{report.artifacts} files, bundle {report.digest[:12]}"
    lines.append(Line("sync", str(cache.root), result, said, detail))
    lines += [Line("view", name, Result.DONE, "built", str(path)) for name, path in report.views.items()]
    lines += _inspected(client, platform)
    if arch is not host.arch:
        reason = f"this host is {host.arch}"
        lines.append(Line("smoke", str(arch), Result.SKIPPED, "skipped: other CPU", reason))
        return lines
    smoked = smoke(cache, host=host)
    for check, subject, status, detail in smoked.rows():
        if status == "pass":
            result = Result.DONE
        else:
            result = Result.SKIPPED if status.startswith("skipped") else Result.FAILED
        lines.append(Line(f"smoke: {check}", subject, result, status, detail))
    if host.sm is None:
        lines.append(
            Line("smoke: GPU", str(arch), Result.SKIPPED, "skipped: no GPU", "no kernel was launched")
        )
    return lines


def _resolve(client: httpx.Client, pin_set: PinSet, platform: Platform) -> Line:
    """Ask what a node of this platform gets, and say why."""
    params = {"cuda": str(platform.cuda), "arch": str(platform.arch), "pins": pin_set.name}
    if platform.sm is not None:
        params["sm"] = str(platform.sm)
    response = client.get("/v1/resolve", params=params)
    if response.status_code == 404:
        return Line(
            "resolve", str(platform), Result.SKIPPED, "skipped: not pinned", response.json()["detail"]
        )
    if response.is_error:
        raise ServerRefused("resolve", response.json())
    answer = response.json()
    detail = f"{answer['artifact_count']} artifacts, {size_text(answer['total_size'])}"
    if not answer["complete"]:
        detail += f"; incomplete, pinned wheels missing: {len(answer['missing'])}"
    return Line("resolve", str(platform), Result.DONE, "resolved", detail)


def _inspected(client: httpx.Client, platform: Platform) -> list[Line]:
    """Show what the catalog read out of the runtime library of this platform."""
    params = {"project": "apache_tvm_ffi", "cuda": str(platform.cuda), "arch": str(platform.arch)}
    page, _ = _ask(client, "artifacts", "GET", "/v1/artifacts", params=params)
    lines: list[Line] = []
    for artifact in page["artifacts"]:
        facts = artifact.get("inspection")
        if artifact["kind"] == "tvm_ffi" and facts is not None:
            detail = (
                f"ELF {facts['machine']}, needs glibc {facts['glibc']}, GLIBCXX {facts['glibcxx']}, "
                f"{len(facts['needed'])} libraries"
            )
            lines.append(Line("inspect", artifact["path"], Result.DONE, "recorded", detail))
    return lines


def _platform(pin_set: PinSet, arch: Arch, host: Host) -> Platform:
    """The host's platform, or on a host that tells no CUDA version the newest one that is pinned."""
    from kernel_depot.platform import Platform
    from kernel_depot.worker.errors import PlatformUnknown
    from kernel_depot.worker.facts import find_platform

    newest = max((pin.cuda for pin in pin_set.pins if pin.arch is arch), default=pin_set.pins[0].cuda)
    if arch is not host.arch:
        return Platform(newest, arch)
    try:
        return find_platform()
    except PlatformUnknown:
        return Platform(newest, arch, host.sm)


def _progress_line(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def _quiet(text: str) -> None:
    """Say nothing beside JSON."""


def _as_json(line: Line) -> dict[str, str]:
    return {
        "step": line.step,
        "subject": line.subject,
        "result": line.result.value,
        "said": line.said,
        "detail": line.detail,
    }


def _print(lines: list[Line], downloaded: int) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Kernel Depot demo")
    for column in ("step", "subject", "result", "detail"):
        table.add_column(column, overflow="fold")
    for line in lines:
        colour = COLOURS[line.result]
        cells = [escape(cell) for cell in (line.step, line.subject, line.said, line.detail)]
        cells[2] = f"[{colour}]{cells[2]}[/]"
        table.add_row(*cells)
    # A log has no width of its own; 80 columns would fold every digest and path.
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if downloaded:
        print(f"downloaded: {size_text(downloaded)}; run it again: nothing is downloaded twice")
    else:
        print("downloaded: nothing; everything that could be reached was here already")
