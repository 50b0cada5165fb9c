"""Extraction of honest wheels: what is recorded, what is staged, in which memory."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from isal import isal_zlib

from kernel_depot.bundle import ArtifactKind
from kernel_depot.digest import sha256_bytes, sha256_file
from kernel_depot.platform import Arch
from kernel_depot.wheels.archive import ArchiveLimits
from kernel_depot.wheels.errors import WheelArchContradiction, WheelError
from kernel_depot.wheels.extract import Expectation, ExtractedWheel, extract

FILENAME = "kernels-1.0-py3-none-any.whl"
INFO = "kernels-1.0.dist-info"


def _extract(root: Path, data: bytes, *, filename: str = FILENAME, **kwargs: Any) -> ExtractedWheel:
    path = root / "wheel"
    path.write_bytes(data)
    staging = root / "staging"
    staging.mkdir()
    expect = kwargs.pop("expect", Expectation(filename, sha256_bytes(data)))
    return extract(path, staging=staging, expect=expect, **kwargs)


def staged(staging: Path, sha256: str) -> Path:
    return staging / sha256[:2] / sha256


def test_records_all_and_stages_artifacts_once(tmp_path: Path, forge: Any) -> None:
    uri = "norm"
    files = {
        f"flashinfer_jit_cache/jit_cache/{uri}/{uri}.so": b"\x7fELF module",
        "tvm_ffi/lib/libtvm_ffi.so": b"\x7fELF ffi",
        "kernels/a.cubin": b"cubin",
        "kernels/same.cubin": b"cubin",
        "kernels/empty.cubin": b"",
        "kernels/a.cubin.lock": b"",
        "kernels/code.py": b"print()",
        "kernels-1.0.data/scripts/tool": b"#!python",
    }
    parts = [forge.Part("kernels/", attributes=(stat.S_IFDIR | 0o755) << 16)]
    parts += [
        forge.Part(name, content, method=index % 2 * 8) for index, (name, content) in enumerate(files.items())
    ]
    data = forge.pack(forge.wheel(parts))
    wheel = _extract(tmp_path, data)

    assert (wheel.filename, wheel.project, wheel.version) == (FILENAME, "kernels", "1.0")
    assert wheel.size == len(data)
    found = {member.path: member for member in wheel.members}
    assert set(found) == {*files, f"{INFO}/METADATA", f"{INFO}/WHEEL", f"{INFO}/RECORD"}
    assert wheel.unpacked_size == sum(member.size for member in wheel.members)
    for name, content in files.items():
        assert (found[name].sha256, found[name].size) == (sha256_bytes(content), len(content))
    kinds = {name: found[name].kind for name in files}
    assert kinds == dict(
        zip(
            files,
            [ArtifactKind.MODULE, ArtifactKind.TVM_FFI, *[ArtifactKind.CUBIN] * 3, None, None, None],
            strict=True,
        )
    )
    assert found[f"flashinfer_jit_cache/jit_cache/{uri}/{uri}.so"].module == uri
    assert found[f"{INFO}/RECORD"].kind is ArtifactKind.METADATA
    there = {path.name: path for path in (tmp_path / "staging").glob("*/*")}
    assert set(there) == set(wheel.blobs) == {m.sha256 for m in wheel.members if m.kind is not None}
    for name, path in there.items():
        assert sha256_file(path) == name
        assert stat.S_IMODE(path.stat().st_mode) & 0o222 == 0
    assert (
        found["kernels/a.cubin"].staged == found["kernels/same.cubin"].staged == there[sha256_bytes(b"cubin")]
    )
    assert found["kernels/code.py"].staged is None


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_large_members_in_pieces(tmp_path: Path, forge: Any, threads: int) -> None:
    body = os.urandom(64) * (200 << 10)
    files = {"a.cubin": body, "twin.cubin": body, "b.so": body[1:], "c.cubin": b"small"}
    parts = [forge.Part(name, content) for name, content in files.items()]
    wheel = _extract(
        tmp_path, forge.pack(forge.wheel(parts)), threads=threads, limits=ArchiveLimits(max_ratio=2000)
    )
    found = {member.path: member for member in wheel.members}
    assert all(found[name].sha256 == sha256_bytes(content) for name, content in files.items())
    assert {path.name for path in (tmp_path / "staging").glob("*/*")} == set(wheel.blobs)
    assert all(sha256_file(path) == path.name for path in (tmp_path / "staging").glob("*/*"))


def test_progress_adds_up(tmp_path: Path, forge: Any) -> None:
    parts = [forge.Part(f"{number}.cubin", bytes([number]) * 999) for number in range(50)]
    parts.append(forge.Part("large.cubin", os.urandom(9 << 20), method=0))
    told: list[tuple[int, int]] = []
    totals: list[tuple[int, int]] = []
    wheel = _extract(
        tmp_path,
        forge.pack(forge.wheel(parts)),
        on_progress=lambda size, members: told.append((size, members)),
        on_totals=lambda size, members: totals.append((size, members)),
    )
    assert totals == [(wheel.unpacked_size, len(wheel.members))]
    assert told[-1] == totals[0]
    assert told == sorted(told)


@pytest.mark.parametrize("algorithm", ["sha256", "sha384", "sha512", "sha3_256", "sha3_512"])
@pytest.mark.parametrize("size", [10, 5 << 20])
def test_stronger_hashes_in_record(tmp_path: Path, forge: Any, algorithm: str, size: int) -> None:
    body = b"x" * size
    parts = forge.wheel(
        [forge.Part("a.cubin", body, method=0)],
        edit=lambda rows: [forge.record_row("a.cubin", body, algorithm), *rows[1:]],
    )
    assert _extract(tmp_path, forge.pack(parts)).members[0].sha256 == sha256_bytes(body)


def test_signatures_of_record_need_no_row(tmp_path: Path, forge: Any) -> None:
    signatures = [forge.Part(f"{INFO}/RECORD.jws", b"{}"), forge.Part(f"{INFO}/RECORD.p7s", b"s")]
    wheel = _extract(tmp_path, forge.pack(forge.wheel([forge.Part("a.cubin", b"a")], extra=signatures)))
    assert sum(member.path.startswith(f"{INFO}/RECORD.") for member in wheel.members) == 2


def test_data_directory_is_seen_through(tmp_path: Path, forge: Any) -> None:
    path = "kernels-1.0.data/platlib/flashinfer_jit_cache/jit_cache/page/page.so"
    wheel = _extract(tmp_path, forge.pack(forge.wheel([forge.Part(path, b"\x7fELF")])))
    assert (wheel.members[0].kind, wheel.members[0].module) == (ArtifactKind.MODULE, "page")


def test_pinned_record_and_arch(tmp_path: Path, forge: Any) -> None:
    parts = forge.wheel([forge.Part("a.cubin", b"a")])
    data = forge.pack(parts)
    filename = "kernels-1.0-cp39-abi3-manylinux_2_28_aarch64.whl"
    record = sha256_bytes(parts[-1].content)
    expect = Expectation(filename, sha256_bytes(data), Arch.AARCH64, record)
    assert _extract(tmp_path, data, expect=expect).filename == filename
    with pytest.raises(WheelArchContradiction, match="aarch64"):
        extract(tmp_path / "wheel", staging=tmp_path, expect=Expectation(filename, arch=Arch.X86_64))


def test_pieces_of_a_real_wheel_agree_with_zipfile(tmp_path: Path) -> None:
    import ensurepip

    bundled = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("*.whl"))
    if not bundled:
        pytest.skip("this Python has no bundled wheels")
    wheel = extract(bundled[0], staging=tmp_path, expect=Expectation(bundled[0].name))
    with zipfile.ZipFile(bundled[0]) as archive:
        contents = {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}
    assert {m.path: m.sha256 for m in wheel.members} == {k: sha256_bytes(v) for k, v in contents.items()}


@settings(
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, forge: Any, place: float, mask: int
) -> None:
    files = {"a.cubin": b"machine code " * 9, "b.cubin": b"", "c.py": b"code"}
    parts = [forge.Part(name, content, descriptor=16) for name, content in files.items()]
    data = bytearray(forge.pack(forge.wheel(parts)))
    root = tmp_path_factory.mktemp("flip")
    intact = _extract(root, bytes(data))
    data[int(place * len(data))] ^= mask
    flipped = root / "flipped"
    flipped.mkdir()
    try:
        found = _extract(flipped, bytes(data), expect=Expectation(FILENAME))
    except WheelError:
        return
    assert [(m.path, m.sha256, m.kind) for m in found.members] == [
        (m.path, m.sha256, m.kind) for m in intact.members
    ]


def test_artifacts_are_shown_once_with_their_content(tmp_path: Path, forge: Any) -> None:
    large = os.urandom(5 << 20)
    files = {"a.cubin": b"a", "twin.cubin": b"a", "large.cubin": large, "twin2.cubin": large, "code.py": b"c"}
    shown: list[tuple[ArtifactKind, str, bytes]] = []

    def look(path: str, kind: ArtifactKind, sha256: str, content: memoryview | Path) -> None:
        assert isinstance(content, Path) == path.startswith(("large", "twin2"))
        shown.append((kind, sha256, content.read_bytes() if isinstance(content, Path) else bytes(content)))

    parts = [forge.Part(name, content) for name, content in files.items()]
    wheel = _extract(tmp_path, forge.pack(forge.wheel(parts)), look=look)
    assert {sha256 for _, sha256, _ in shown} == set(wheel.blobs)
    assert len(shown) == len(wheel.blobs)
    assert all(sha256_bytes(content) == sha256 for _, sha256, content in shown)


def test_what_a_look_raises_refuses_the_wheel(tmp_path: Path, forge: Any) -> None:
    def look(path: str, kind: ArtifactKind, sha256: str, content: memoryview | Path) -> None:
        raise WheelArchContradiction("refused")

    with pytest.raises(WheelArchContradiction, match="refused"):
        _extract(tmp_path, forge.pack(forge.wheel([forge.Part("a.cubin", b"a")])), look=look)


def test_a_failing_listener_stops_everything(tmp_path: Path, forge: Any) -> None:
    def fail(size: int, members: int) -> None:
        raise RuntimeError("listener")

    parts = [forge.Part(f"{number}.cubin", os.urandom(1 << 20), method=0) for number in range(30)]
    with pytest.raises(RuntimeError, match="listener"):
        _extract(tmp_path, forge.pack(forge.wheel(parts)), on_progress=fail)


_CHILD = """
import resource, sys
from pathlib import Path
from kernel_depot.wheels.archive import ArchiveLimits
from kernel_depot.wheels.extract import Expectation, extract
# Private writable memory, counted by the kernel: anything over it fails as MemoryError.
resource.setrlimit(resource.RLIMIT_DATA, (400 << 20, 400 << 20))
wheel = extract(Path(sys.argv[1]), staging=Path(sys.argv[2]), expect=Expectation(sys.argv[3], sys.argv[4]),
                limits=ArchiveLimits(max_ratio=5000))
print(max(member.size for member in wheel.members))
"""


def test_memory_stays_bounded_for_a_huge_member(tmp_path: Path, forge: Any) -> None:
    name, pieces, piece = "huge.cubin", 40, bytes(16 << 20)
    digest, crc, packer = hashlib.sha256(), 0, isal_zlib.compressobj(0, isal_zlib.DEFLATED, -15)
    packed = bytearray()
    for _ in range(pieces):
        digest.update(piece)
        crc = isal_zlib.crc32(piece, crc)
        packed += packer.compress(piece)
    packed += packer.flush()
    size = pieces * len(piece)
    truth = {"size": size, "crc": crc}
    row = f"{name},sha256={base64.urlsafe_b64encode(digest.digest()).rstrip(b'=').decode()},{size}"
    part = forge.Part(name, packed=bytes(packed), central=truth, local=truth)
    data = forge.pack(forge.wheel([part], edit=lambda rows: [row, *rows[1:]]))
    wheel, staging = tmp_path / "wheel", tmp_path / "staging"
    wheel.write_bytes(data)
    staging.mkdir()
    command = [sys.executable, "-c", _CHILD, str(wheel), str(staging), FILENAME, sha256_bytes(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == size == staged(staging, digest.hexdigest()).stat().st_size
    staged(staging, digest.hexdigest()).unlink()


_FORKED = """
import json, sys
from pathlib import Path
from kernel_depot.errors import DepotError
from kernel_depot.wheels.archive import ArchiveLimits
from kernel_depot.wheels.extract import Expectation, extract
from kernel_depot.wheels.inspect import Inspection
def look(path, kind, sha256, content):
    return Inspection("cubin", path)
told = []
try:
    wheel = extract(Path(sys.argv[1]), staging=Path(sys.argv[2]),
                    expect=Expectation(sys.argv[3], sys.argv[4]), limits=ArchiveLimits(max_ratio=5000),
                    look=look, forks=int(sys.argv[5]),
                    on_progress=lambda size, members: told.append((size, members)))
except DepotError as error:
    print(json.dumps({"slug": error.slug, "where": error.where}))
else:
    assert set(wheel.inspections) == set(wheel.blobs)
    assert told == sorted(told)
    print(json.dumps({"members": [[member.path, member.sha256] for member in wheel.members]}))
"""


@pytest.mark.parametrize("forks", [1, 3])
@pytest.mark.parametrize("fault", ["none", "member", "whole", "both", "structure"])
def test_processes_find_what_threads_find(tmp_path: Path, forge: Any, fault: str, forks: int) -> None:
    size = 300 << 10
    parts = [forge.Part(f"{number}.cubin", f"{number:06}".encode() * (size // 6)) for number in range(70)]
    parts += [forge.Part(f"{number}.lock", b"") for number in range(70)]
    parts += [forge.Part("twin.cubin", parts[0].content), forge.Part("large.cubin", bytes(9 << 20))]
    wrong = forge.record_row("40.cubin", bytes(size))
    edit = (lambda rows: [wrong, *rows[:40], *rows[41:]]) if fault in ("member", "both") else None
    data = forge.pack(forge.wheel(parts, edit=edit) if edit else forge.wheel(parts))
    data = data[:-1] if fault == "structure" else data
    digest = "0" * 64 if fault in ("whole", "both") else sha256_bytes(data)
    (tmp_path / "wheel").write_bytes(data)
    staging = tmp_path / "staging"
    staging.mkdir()
    command = [sys.executable, "-c", _FORKED, tmp_path / "wheel", staging, FILENAME, digest, str(forks)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    threaded = tmp_path / "threaded"
    threaded.mkdir()
    expect = Expectation(FILENAME, digest)
    limits = ArchiveLimits(max_ratio=5000)
    if fault != "none":
        with pytest.raises(WheelError) as caught:
            _extract(threaded, data, expect=expect, limits=limits)
        assert found == {"slug": caught.value.slug, "where": caught.value.where}
        return
    expected = _extract(threaded, data, expect=expect, limits=limits)
    assert found == {"members": [[member.path, member.sha256] for member in expected.members]}
    assert {path.name for path in staging.glob("*/*")} == set(expected.blobs)
    assert all(sha256_file(path) == path.name for path in staging.glob("*/*"))
