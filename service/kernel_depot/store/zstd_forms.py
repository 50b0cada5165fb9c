"""The zstd form of a blob: one frame (RFC 8878) that decodes to the bytes the blob's digest names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import zstandard

from kernel_depot.digest import sha256_file
from kernel_depot.store.blobs import StagedBlob, Store

LEVEL = 3
WORTH = 0.9  # a form larger than this part of the blob is not kept
SMALLEST = 256  # bytes; below, a frame's header and a file's inode weigh more than what is saved


@dataclass(frozen=True, slots=True)
class ZstdForm:
    """A form under a private name: its own size and SHA-256, and the blob it decodes to."""

    staged: StagedBlob
    form_sha256: str


def compress(store: Store, sha256: str, *, size: int, staging: Path) -> ZstdForm | None:
    """Write the zstd form of a stored blob into `staging`; None when it is not worth its bytes.

    Raise BlobMissing, StoreUnreachable.
    """
    if size < SMALLEST:
        return None
    private = staging / f"{sha256}.zst"
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    with private.open("xb") as file, compressor.stream_writer(file, size=size, closefd=False) as writer:
        for piece in store.read(sha256):
            writer.write(piece)
    form_size = private.stat().st_size
    if form_size > size * WORTH:
        private.unlink()
        return None
    private.chmod(0o444)
    return ZstdForm(StagedBlob(sha256, form_size, private), sha256_file(private))


def decodes_to(pieces: Iterable[bytes], sha256: str) -> bool:
    """Tell whether a zstd form decodes to the bytes of that digest."""
    digest = hashlib.sha256()
    decoder = zstandard.ZstdDecompressor().decompressobj()
    try:
        for piece in pieces:
            digest.update(decoder.decompress(piece))
    except zstandard.ZstdError:
        return False
    return digest.hexdigest() == sha256
