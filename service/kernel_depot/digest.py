"""SHA-256 names: how blobs, wheels, revisions and bundles are called."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

SHA256_HEX = re.compile(r"[0-9a-f]{64}")
READ_SIZE = 1 << 20


def is_sha256(text: str) -> bool:
    """Tell whether `text` is a lower-case hexadecimal SHA-256."""
    return SHA256_HEX.fullmatch(text) is not None


def sha256_bytes(data: bytes | memoryview) -> str:
    """Return the lower-case hexadecimal SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the lower-case hexadecimal SHA-256 of a file's bytes, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    buffer = bytearray(READ_SIZE)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()
