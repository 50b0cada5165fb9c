from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.api.sending import BlobDamaged, Piece
from kernel_depot.api.tarstream import (
    BATCH,
    Entry,
    plain_length,
    plain_stream,
    raw_frame,
    tar_header,
    zstd_length,
    zstd_stream,
)


class Files:
    """Forms of blobs as files, or as pieces when they are not local."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.forms: dict[tuple[str, bool], bytes] = {}

    def add(self, data: bytes, *, compressed: bool) -> Entry:
        sha256 = hashlib.sha256(data).hexdigest()
        self.forms[sha256, False] = data
        form = zstandard.compress(data) if compressed else None
        if form is not None:
            self.forms[sha256, True] = form
        if self.folder is not None:
            (self.folder / sha256).write_bytes(data)
            if form is not None:
                (self.folder / f"{sha256}-zstd").write_bytes(form)
        return Entry(sha256, len(data), len(form) if form is not None else None)

    def path(self, entry: Entry) -> Path | None:
        name = entry.sha256 + ("-zstd" if entry.zstd_size is not None else "")
        return self.folder / name if self.folder is not None else None

    def read(self, entry: Entry) -> Iterator[Piece]:
        data = self.forms[entry.sha256, entry.zstd_size is not None]
        for start in range(0, len(data), 1000):
            yield memoryview(data)[start : start + 1000]


def members(data: bytes) -> list[tuple[str, bytes, int]]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        found = []
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found.append((member.name, file.read(), member.mode))
    return found


SIZES = [0, 1, 511, 512, 513, 100_000, BATCH - 512, BATCH, 3 * BATCH + 7]


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("coded", [True, False])
def test_tar_reads_back_every_blob_in_order(tmp_path: Path, local: bool, coded: bool) -> None:
    files = Files(tmp_path if local else None)
    blobs = [bytes([number]) * size for number, size in enumerate(SIZES)]
    entries = [files.add(blob, compressed=coded and number % 2 == 0) for number, blob in enumerate(blobs)]
    if coded:
        stream = b"".join(zstd_stream(entries, files))
        assert len(stream) == zstd_length(entries)
        data = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True).read()
    else:
        data = b"".join(plain_stream(entries, files))
    assert len(data) == plain_length(entries)
    assert members(data) == [(f"sha256/{hashlib.sha256(blob).hexdigest()}", blob, 0o444) for blob in blobs]


@given(st.lists(st.tuples(st.binary(max_size=2000), st.booleans()), max_size=20))
def test_any_mix_of_forms_has_the_announced_length(blobs: list[tuple[bytes, bool]]) -> None:
    files = Files(None)
    entries = [files.add(blob, compressed=compressed) for blob, compressed in blobs]
    stream = b"".join(zstd_stream(entries, files))
    assert len(stream) == zstd_length(entries)
    data = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True).read()
    assert [blob for _, blob, _ in members(data)] == [blob for blob, _ in blobs]


@given(st.binary(max_size=300_000))
def test_raw_frame_is_a_zstd_frame(data: bytes) -> None:
    assert not data or zstandard.decompress(raw_frame(data)) == data


@pytest.mark.parametrize("size", [255, 256, 65_791, 65_792, 131_072, 131_073, BATCH])
def test_raw_frame_at_the_edges_of_its_header(size: int) -> None:
    assert zstandard.decompress(raw_frame(b"k" * size)) == b"k" * size


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("change", ["shorter", "longer", "gone"])
def test_a_blob_that_is_not_whole_ends_the_stream(tmp_path: Path, coded: bool, change: str) -> None:
    files = Files(tmp_path)
    entries = [files.add(bytes([n]) * 5000, compressed=False) for n in range(3)]
    victim = tmp_path / entries[1].sha256
    if change == "gone":
        victim.unlink()
    else:
        victim.write_bytes(b"x" * (4999 if change == "shorter" else 5001))
    stream = zstd_stream(entries, files) if coded else plain_stream(entries, files)
    with pytest.raises(BlobDamaged) as refused:
        list(stream)
    assert entries[1].sha256 in str(refused.value)


def test_batches_are_of_their_own_so_that_a_slow_socket_sees_no_later_bytes(tmp_path: Path) -> None:
    files = Files(tmp_path)
    entries = [files.add(bytes([n]) * BATCH, compressed=False) for n in range(4)]
    pieces = list(plain_stream(entries, files))
    assert len(pieces) > 3
    assert [blob for _, blob, _ in members(b"".join(pieces))] == [bytes([n]) * BATCH for n in range(4)]


def test_header_refuses_what_it_cannot_say() -> None:
    with pytest.raises(ValueError, match="ustar"):
        tar_header("0" * 64, 8**11)
