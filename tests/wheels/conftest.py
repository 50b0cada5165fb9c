"""A forge for archives: byte-exact zip files, honest by default, with any single field turned into a lie."""

from __future__ import annotations

import base64
import hashlib
import stat
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

FILE = stat.S_IFREG | 0o644
UINT32 = 0xFFFFFFFF
ZIP64_DESCRIPTORS = (20, 24)


@dataclass
class Part:
    """One member. `central` and `local` override fields of its two headers by name."""

    name: str | bytes
    content: bytes = b""
    method: int = 8
    flags: int = 0
    attributes: int = FILE << 16
    packed: bytes | None = None
    descriptor: int = 0
    before: bytes = b""
    after: bytes = b""
    central: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Any] = field(default_factory=dict)


def deflate(content: bytes, level: int = 6) -> bytes:
    stream = zlib.compressobj(level, zlib.DEFLATED, -15)
    return stream.compress(content) + stream.flush()


def _local(part: Part, fields: dict[str, Any]) -> bytes:
    at = {**fields, **part.local}
    return (
        struct.pack(
            "<4sHHHLLLLHH",
            at.get("signature", b"PK\x03\x04"),
            20,
            at["flags"],
            at["method"],
            0x5A210000,
            at["crc"],
            at["packed"],
            at["size"],
            len(at["name"]),
            len(at["extra"]),
        )
        + at["name"]
        + at["extra"]
    )


def _central(part: Part, fields: dict[str, Any]) -> bytes:
    at = {**fields, **part.central}
    return (
        struct.pack(
            "<4sBBHHHLLLLHHHHHLL",
            at.get("signature", b"PK\x01\x02"),
            20,
            3,
            20,
            at["flags"],
            at["method"],
            0x5A210000,
            at["crc"],
            at["packed"],
            at["size"],
            len(at["name"]),
            len(at["extra"]),
            0,
            at.get("disk", 0),
            0,
            part.attributes,
            at["header"],
        )
        + at["name"]
        + at["extra"]
    )


def pack(
    parts: Sequence[Part],
    *,
    prefix: bytes = b"",
    before_directory: bytes = b"",
    before_end: bytes = b"",
    comment: bytes = b"",
    suffix: bytes = b"",
    zip64: bool = False,
    end: dict[str, int] | None = None,
    end64: dict[str, int] | None = None,
) -> bytes:
    """Lay the parts out as a zip file. `end` and `end64` override fields of the end records."""
    body = bytearray()
    directory = bytearray()
    for part in parts:
        body += part.before
        name = part.name if isinstance(part.name, bytes) else part.name.encode()
        if part.packed is not None:
            packed = part.packed
        else:
            packed = deflate(part.content) if part.method == 8 else part.content
        fields = {
            "flags": part.flags | (0 if name.isascii() else 0x800) | (8 if part.descriptor else 0),
            "method": part.method,
            "crc": zlib.crc32(part.content),
            "packed": len(packed),
            "size": len(part.content),
            "name": name,
            "extra": b"",
            "header": len(body),
        }
        directory += _central(part, fields)
        late = {"crc": 0, "packed": 0, "size": 0} if part.descriptor else {}
        body += _local(part, {**fields, **late}) + packed
        if part.descriptor:
            form = "<LQQ" if part.descriptor in ZIP64_DESCRIPTORS else "<LLL"
            if part.descriptor in (16, 24):
                body += b"PK\x07\x08"
            body += struct.pack(form, fields["crc"], fields["packed"], fields["size"])
        body += part.after
    body += before_directory
    at = {"disk": 0, "count_here": len(parts), "count": len(parts), "length": len(directory)}
    at["start"] = len(body)
    wide = {**at, "signature_offset": len(body) + len(directory) + len(before_end), **(end64 or {})}
    if zip64:
        at |= {"count_here": 0xFFFF, "count": 0xFFFF, "length": UINT32, "start": UINT32}
    at |= end or {}
    out = prefix + bytes(body) + bytes(directory) + before_end
    if zip64:
        out += struct.pack(
            "<4sQHHLLQQQQ", b"PK\x06\x06", wide.get("record", 44), 45, 45, 0, 0,
            wide["count_here"], wide["count"], wide["length"], wide["start"],
        )  # fmt: skip
        out += struct.pack("<4sLQL", b"PK\x06\x07", 0, wide["signature_offset"], wide.get("disks", 1))
    out += struct.pack(
        "<4sHHHHLLH", b"PK\x05\x06", at["disk"], at["disk"], at["count_here"], at["count"],
        at["length"], at["start"], len(comment),
    )  # fmt: skip
    return out + comment + suffix


def record_row(path: str, content: bytes, algorithm: str = "sha256") -> str:
    digest = base64.urlsafe_b64encode(hashlib.new(algorithm, content).digest()).rstrip(b"=").decode()
    return f'"{path}",{algorithm}={digest},{len(content)}'


def wheel(
    parts: Sequence[Part],
    *,
    project: str = "kernels",
    version: str = "1.0",
    metadata: bytes | None = None,
    edit: Callable[[list[str]], list[str]] = lambda rows: rows,
    extra: Sequence[Part] = (),
) -> list[Part]:
    """Add METADATA, WHEEL and RECORD to the parts. `edit` changes RECORD's rows; `extra` go unlisted."""
    info = f"{project}-{version}.dist-info"
    if metadata is None:
        metadata = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n\nText\n".encode()
    listed = [
        *parts,
        Part(f"{info}/METADATA", metadata),
        Part(f"{info}/WHEEL", b"Wheel-Version: 1.0\nTag: py3-none-any\n"),
    ]
    rows = [
        record_row(part.name if isinstance(part.name, str) else part.name.decode("latin-1"), part.content)
        for part in listed
        if not str(part.name).endswith("/")
    ]
    rows.append(f"{info}/RECORD,,")
    return [*listed, *extra, Part(f"{info}/RECORD", "\r\n".join([*edit(rows), ""]).encode())]


@dataclass(frozen=True)
class Forge:
    """The tools above in one name, since test modules cannot import each other."""

    Part = Part
    deflate = staticmethod(deflate)
    pack = staticmethod(pack)
    wheel = staticmethod(wheel)
    record_row = staticmethod(record_row)


@pytest.fixture
def forge() -> Forge:
    return Forge()
