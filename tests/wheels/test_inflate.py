"""Both ways to inflate a member agree, and neither takes anything but one exact stream."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_depot.wheels import inflate
from kernel_depot.wheels.inflate import ROOM, Inflater, open_inflater


@pytest.fixture(params=["libdeflate", "isal"])
def inflater(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Inflater:
    if request.param == "isal":
        monkeypatch.setattr(inflate, "_libdeflate", lambda: None)
    else:
        assert inflate._libdeflate() is not None, "the distribution deflate shows no libdeflate"
    return open_inflater()


def pack(content: bytes, level: int = 6) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, -15)
    return packer.compress(content) + packer.flush()


def test_content_and_crc(inflater: Inflater) -> None:
    for content in (b"", b"a", b"abc" * 100_000, bytes(range(256)) * 4096, bytes(ROOM)):
        found = inflater.inflate(pack(content), len(content))
        assert found is not None
        assert bytes(found) == content
        assert inflater.crc32(found) == zlib.crc32(content)


def test_anything_but_one_exact_stream_is_refused(inflater: Inflater) -> None:
    content = b"kernel" * 5000
    packed = pack(content)
    for wrong in (packed[:-1], packed + b"\0", packed + pack(b""), b"", b"\xff" * 50, packed[1:]):
        assert inflater.inflate(wrong, len(content)) is None
    for size in (0, len(content) - 1, len(content) + 1):
        assert inflater.inflate(packed, size) is None
    found = inflater.inflate(packed, len(content))
    assert found is not None
    assert bytes(found) == content


@settings(max_examples=60)
@given(st.binary(max_size=5000), st.integers(0, 9), st.data())
def test_both_agree_on_damaged_streams(content: bytes, level: int, data: st.DataObject) -> None:
    packed = bytearray(pack(content, level))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(0, 255))
    found = [
        None if view is None else bytes(view)
        for view in (
            open_inflater().inflate(bytes(packed), len(content)),
            inflate._Isal().inflate(bytes(packed), len(content)),
        )
    ]
    assert found[0] == found[1]
