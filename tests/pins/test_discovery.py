"""Newer pins found in indexes on loopback: agreed on by a set's projects, or refused with the reason."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kernel_depot.pins.candidates import Indexes, IndexPlace
from kernel_depot.pins.discovery import Discovery, discover
from kernel_depot.pins.document import parse_pin_set
from kernel_depot.pins.index import IndexUnreachable
from kernel_depot.platform import CudaTag

RELEASES = "https://github.com/x/releases"


@dataclass
class Listed:
    """One file of a project. `metadata` None: the index serves none."""

    filename: str
    sha256: str | None
    url: str
    metadata: str | None = None
    yanked: bool = False


@dataclass
class IndexServer:
    """What the index holds, by path below its root and project; `asked` are the paths that were asked for."""

    as_json: bool
    projects: dict[str, list[Listed]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    address: str = ""

    def page(self, entries: list[Listed]) -> tuple[str, bytes]:
        if not self.as_json:
            links = "".join(
                f'<a href="{item.url}{f"#sha256={item.sha256}" if item.sha256 else ""}"'
                f"{' data-yanked=' + chr(34) + 'bad' + chr(34) if item.yanked else ''}"
                f"{' data-core-metadata=' + chr(34) + 'true' + chr(34) if item.metadata else ''}>"
                f"{item.filename}</a>\n"
                for item in entries
            )
            return "text/html", f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        members = {
            "meta": {"api-version": "1.1"},
            "name": "x",
            "versions": [],
            "files": [
                {
                    "filename": item.filename,
                    "url": item.url,
                    "hashes": {"sha256": item.sha256} if item.sha256 else {},
                    "yanked": item.yanked,
                    "core-metadata": bool(item.metadata),
                    "size": 1234,
                }
                for item in entries
            ],
        }
        return "application/vnd.pypi.simple.v1+json", json.dumps(members).encode()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        self.asked.append(path)
        if path in self.files:
            return 200, "application/octet-stream", self.files[path]
        entries = self.projects.get(path.strip("/"))
        if entries is None:
            return 404, "text/plain", b""
        return (200, *self.page(entries))


@pytest.fixture(params=["html", "json"])
def wheel_index(request: pytest.FixtureRequest) -> Iterator[IndexServer]:
    """An empty index; fill `projects` with paths as `whl/cu130/flashinfer-jit-cache`."""
    held = IndexServer(as_json=request.param == "json")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, body = held.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        held.address = f"http://127.0.0.1:{server.server_address[1]}"
        yield held
        server.shutdown()
        thread.join()


def jit(version: str, cuda: str, arch: str) -> str:
    return f"flashinfer_jit_cache-{version}+{cuda}-cp39-abi3-manylinux_2_28_{arch}.whl"


def ffi(version: str, arch: str, python: str = "cp310") -> str:
    return f"apache_tvm_ffi-{version}-{python}-{python}-manylinux_2_24_{arch}.manylinux_2_28_{arch}.whl"


def sha(filename: str) -> str:
    return hashlib.sha256(filename.encode()).hexdigest()


def pins(*, cubin: bool = False) -> str:
    """A set for three platforms, with comments, tables in an order of its own, and one reused wheel."""
    places = [("cu131", "x86_64"), ("cu130", "aarch64"), ("cu130", "x86_64")]
    lines = ["# Pinned by hand.\n\n"]
    for cuda, arch in places:
        name = jit("0.6.3", "cu130", arch)
        lines.append(
            f'[flashinfer-jit-cache.{cuda}.{arch}] # {cuda}\nfilename = "{name}"  # the wheel\n'
            f'url = "{RELEASES}/{name}"\nsha256 = "{sha(name)}"\nsize = 7\nrecord_sha256 = "{"d" * 64}"\n\n'
        )
    for cuda, arch in places:
        name = ffi("0.1.6", arch)
        lines.append(
            f'[apache_tvm_ffi.{cuda}.{arch}]\nsha256 = "{sha(name)}"\nfilename = "{name}"\n'
            'index = "local"\n\n'
        )
    if cubin:
        for cuda, arch in places:
            name = "flashinfer_cubin-0.6.3-py3-none-any.whl"
            lines.append(
                f'[flashinfer_cubin.{cuda}.{arch}]\nfilename = "{name}"\nsha256 = "{sha(name)}"\n'
                'index = "local"\n'
            )
    group = '[groups.opponent]\ndefault = true\nmodules = ["norm"]  # by name\n'
    return "".join(lines) + group + "# The end.\n"


def listed(names: Iterable[str], **facts: Any) -> list[Listed]:
    return [Listed(name, sha(name), f"{RELEASES}/{name}", **facts) for name in names]


def fill(
    server: IndexServer, *, versions: Iterable[str] = ("0.6.3", "0.6.4"), wants: str = ">=0.1.6,<0.2"
) -> None:
    """Put FlashInfer's releases and apache-tvm-ffi 0.1.6, 0.1.7 and 0.2.0 into the index."""
    for version in versions:
        for arch in ("x86_64", "aarch64"):
            server.projects.setdefault("whl/cu130/flashinfer-jit-cache", []).extend(
                listed([jit(version, "cu130", arch)])
            )
        python = f"flashinfer_python-{version}-py3-none-any.whl"
        metadata = (
            f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n"
            f'Requires-Dist: apache-tvm-ffi{wants}\nRequires-Dist: apache-tvm-ffi==9; extra == "odd"\n'
        )
        path = f"/files/{python}"
        server.projects.setdefault("simple/flashinfer-python", []).append(
            Listed(python, sha(python), server.address + path, metadata=metadata)
        )
        server.files[f"{path}.metadata"] = metadata.encode()
        server.projects.setdefault("simple/flashinfer-cubin", []).extend(
            listed([f"flashinfer_cubin-{version}-py3-none-any.whl"])
        )
    server.projects["simple/apache-tvm-ffi"] = listed(
        ffi(version, arch, python)
        for version in ("0.1.6", "0.1.7", "0.2.0")
        for arch in ("x86_64", "aarch64")
        for python in ("cp39", "cp310", "cp312")
    )


def look(server: IndexServer, text: str, **options: Any) -> Discovery:
    places = [
        IndexPlace(server.address + "/whl/{cuda}"),
        IndexPlace(server.address + "/simple/", "local"),
    ]
    indexes = Indexes(places, [CudaTag(13, 0), CudaTag(13, 1)])
    try:
        return discover(parse_pin_set(text, name="x", origin="x.toml"), indexes, **options)
    finally:
        indexes.close()


def test_every_platform_gets_the_newest_wheels_and_the_text_stays_otherwise(wheel_index: IndexServer) -> None:
    fill(wheel_index)
    text = pins()
    found = look(wheel_index, text)
    expected = text.replace("0.6.3+cu130", "0.6.4+cu130").replace("-0.1.6-", "-0.1.7-")
    expected = expected.replace(f'record_sha256 = "{"d" * 64}"\n', "")
    expected = expected.replace("size = 7\n", "size = 1234\n" if wheel_index.as_json else "")
    for arch in ("x86_64", "aarch64"):
        expected = expected.replace(sha(jit("0.6.3", "cu130", arch)), sha(jit("0.6.4", "cu130", arch)))
        expected = expected.replace(sha(ffi("0.1.6", arch)), sha(ffi("0.1.7", arch)))
    assert found.text == expected
    assert len(found.changes) == 6
    assert found.why_not == ("apache_tvm_ffi 0.2.0: flashinfer-python asks for <0.2,>=0.1.6",)
    again = look(wheel_index, found.text)
    assert (again.changes, again.text) == ((), found.text)


def test_a_later_minor_of_cuda_gets_its_own_wheel_where_there_is_one(wheel_index: IndexServer) -> None:
    fill(wheel_index)
    own = jit("0.6.4", "cu131", "x86_64")
    wheel_index.projects["whl/cu131/flashinfer-jit-cache"] = listed([own])
    wheel_index.projects["whl/cu130/flashinfer-jit-cache"] += listed([jit("0.6.4", "cu129", "x86_64")])
    found = look(wheel_index, pins())
    after = {
        (str(change.after.cuda), str(change.after.arch)): change.after.filename
        for change in found.changes[:3]
    }
    assert after == {
        ("cu131", "x86_64"): own,
        ("cu130", "x86_64"): jit("0.6.4", "cu130", "x86_64"),
        ("cu130", "aarch64"): jit("0.6.4", "cu130", "aarch64"),
    }


def test_a_version_that_one_platform_lacks_is_passed_over_with_the_reason(wheel_index: IndexServer) -> None:
    fill(wheel_index, versions=("0.6.3", "0.6.4", "0.6.5"))
    pages = wheel_index.projects["whl/cu130/flashinfer-jit-cache"]
    pages[:] = [item for item in pages if item.filename != jit("0.6.5", "cu130", "aarch64")]
    found = look(wheel_index, pins())
    assert {change.after.version for change in found.changes} == {"0.6.4+cu130", "0.1.7"}
    assert "flashinfer 0.6.5: no wheel of flashinfer_jit_cache for cu130 aarch64" in found.why_not


def test_projects_that_cannot_agree_are_not_proposed(wheel_index: IndexServer) -> None:
    fill(wheel_index)
    cubins = wheel_index.projects["simple/flashinfer-cubin"]
    cubins[:] = [item for item in cubins if "0.6.3" in item.filename]
    found = look(wheel_index, pins(cubin=True))
    assert {change.after.project for change in found.changes} == {"apache_tvm_ffi"}
    assert "flashinfer 0.6.4: no wheel of flashinfer_cubin for cu131 x86_64" in found.why_not
    fill(wheel_index)
    found = look(wheel_index, pins(cubin=True), projects=["flashinfer-jit-cache"])
    assert found.changes == ()
    assert found.why_not[0] == (
        "flashinfer 0.6.4: flashinfer_cubin is pinned to 0.6.3 and not among the chosen projects"
    )
    both = look(wheel_index, pins(cubin=True), projects=["flashinfer-jit-cache", "flashinfer-cubin"])
    assert {change.after.version for change in both.changes} == {"0.6.4+cu130", "0.6.4"}


def test_a_version_without_its_python_package_is_not_proposed(wheel_index: IndexServer) -> None:
    fill(wheel_index)
    pythons = wheel_index.projects["simple/flashinfer-python"]
    pythons[:] = [item for item in pythons if "0.6.3" in item.filename]
    found = look(wheel_index, pins(), projects=["flashinfer_jit_cache"])
    assert found.changes == ()
    assert found.why_not == ("flashinfer 0.6.4: no index has flashinfer-python 0.6.4",)


def test_a_runtime_outside_the_new_range_stops_the_proposal(wheel_index: IndexServer) -> None:
    fill(wheel_index, wants=">=0.1.7,<0.2")
    found = look(wheel_index, pins(), projects=["flashinfer_jit_cache"])
    assert found.changes == ()
    assert found.why_not == (
        "flashinfer 0.6.4: it asks for apache_tvm_ffi <0.2,>=0.1.7, and 0.1.6 would stay",
    )
    assert len(look(wheel_index, pins()).changes) == 6


def test_the_range_is_read_from_the_wheel_where_the_index_serves_no_metadata(
    wheel_index: IndexServer,
) -> None:
    fill(wheel_index)
    for item in wheel_index.projects["simple/flashinfer-python"]:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("flashinfer_python.dist-info/METADATA", str(item.metadata))
        path = item.url.removeprefix(wheel_index.address)
        wheel_index.files = {name: data for name, data in wheel_index.files.items() if path not in name}
        wheel_index.files[path] = buffer.getvalue()
        item.metadata, item.sha256 = None, hashlib.sha256(buffer.getvalue()).hexdigest()
    assert {change.after.version for change in look(wheel_index, pins()).changes} == {"0.6.4+cu130", "0.1.7"}
    for item in wheel_index.projects["simple/flashinfer-python"]:
        item.sha256 = "0" * 64
    with pytest.raises(IndexUnreachable, match="DigestMismatchError"):
        look(wheel_index, pins())


def test_yanked_files_and_files_without_a_hash_are_no_candidates(wheel_index: IndexServer) -> None:
    fill(wheel_index, versions=("0.6.3", "0.6.4", "0.6.5"))
    for item in wheel_index.projects["whl/cu130/flashinfer-jit-cache"]:
        if "0.6.5" in item.filename:
            item.yanked = True
        if "0.6.4" in item.filename:
            item.sha256 = None
    found = look(wheel_index, pins(), projects=["flashinfer_jit_cache"])
    assert found.changes == ()
    assert found.why_not == tuple(
        f"{jit('0.6.4', 'cu130', arch)}: the index gives no SHA-256 of it" for arch in ("aarch64", "x86_64")
    )


def test_pre_releases_and_nightly_builds_are_for_those_who_ask(wheel_index: IndexServer) -> None:
    fill(wheel_index, versions=("0.6.3", "0.6.4.dev20260101"))
    assert look(wheel_index, pins(), projects=["flashinfer_jit_cache"]).changes == ()
    found = look(wheel_index, pins(), projects=["flashinfer_jit_cache"], pre=True)
    assert {change.after.version for change in found.changes} == {"0.6.4.dev20260101+cu130"}


def test_an_index_that_fails_is_named(wheel_index: IndexServer) -> None:
    wheel_index.files["/whl/cu130/flashinfer-jit-cache/"] = b"no page"
    with pytest.raises(IndexUnreachable, match="flashinfer_jit_cache") as caught:
        look(wheel_index, pins())
    assert caught.value.where == f"{wheel_index.address}/whl/cu130"


def command(server: IndexServer, file: Path, *words: object, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kernel_depot.cli.main", "pins", "discover", str(file), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "KERNEL_DEPOT_INDEX_LOCAL": f"{server.address}/simple/", "NO_PROXY": "127.0.0.1"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_the_command_prints_the_edit_and_writes_it_when_told(
    wheel_index: IndexServer, tmp_path: Path
) -> None:
    fill(wheel_index)
    file = tmp_path / "kernels.toml"
    file.write_text(pins())
    words = ["--index", wheel_index.address + "/whl/{cuda}", "--index", "local"]
    shown = command(wheel_index, file, *words)
    assert f'+filename = "{jit("0.6.4", "cu130", "x86_64")}"  # the wheel' in shown
    assert "not proposed: apache_tvm_ffi 0.2.0: flashinfer-python asks for" in shown
    assert shown.endswith(f"{file}: 6 newer pins\n")
    assert file.read_text() == pins()
    told = json.loads(command(wheel_index, file, *words, "--write", "--json"))
    assert file.read_text() == told[0]["text"] != pins()
    assert list(tmp_path.iterdir()) == [file]
    assert {change["after"]["index"] for change in told[0]["changes"] if "index" in change["after"]} == {
        "local"
    }
    stuck = command(wheel_index, file, *words, code=1)
    assert "no newer pins to propose" in stuck
