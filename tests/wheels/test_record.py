"""RECORD's rows."""

from __future__ import annotations

import csv
import hashlib
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.wheels.errors import RecordHashMismatch, RecordHashWeak, RecordMalformed, WheelError
from kernel_depot.wheels.record import RecordRow, check_digest, read_record

EMPTY = "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"


def test_rows() -> None:
    data = f'a.so,sha256={EMPTY},0\r\n"b,c.so",sha256={EMPTY},\n\nRECORD,,\n'.encode()
    assert read_record(data, where="test") == {
        "a.so": RecordRow("sha256", EMPTY, 0),
        "b,c.so": RecordRow("sha256", EMPTY, None),
        "RECORD": RecordRow("", "", None),
    }


@pytest.mark.parametrize(
    "text",
    [
        "a.so",
        "a.so,,,",
        ",sha256=,0",
        f"a.so,sha256={EMPTY}=,0",
        f"a.so,sha256={EMPTY[:-1]},0",
        "a.so,sha256=,0",
        f"a.so,sha256={EMPTY},-1",
        f"a.so,sha256={EMPTY},1e3",
        f"a.so,sha256={EMPTY},\u0661",
        'a.so,"unclosed',
        "a\udcff.so,,",
    ],
)
def test_malformed(text: str) -> None:
    with pytest.raises(RecordMalformed):
        read_record(text.encode("utf-8", "surrogateescape"), where="test")


@pytest.mark.parametrize(
    "coded", ["md5=1B2M2Y8AsgTpgAmY7PhCfg", EMPTY, "SHA256=" + EMPTY, "=" + EMPTY, "crc32=AA"]
)
def test_unknown_or_weak_hash(coded: str) -> None:
    with pytest.raises(RecordHashWeak):
        read_record(f"a.so,{coded},0\n".encode(), where="test")


@given(paths=st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1), unique=True))
def test_reads_what_csv_writes(paths: list[str]) -> None:
    out = io.StringIO()
    csv.writer(out).writerows([path, f"sha256={EMPTY}", 0] for path in paths)
    assert list(read_record(out.getvalue().encode(), where="test")) == paths


@given(data=st.binary(max_size=200))
def test_noise_is_read_or_refused(data: bytes) -> None:
    try:
        rows = read_record(data, where="test")
    except WheelError:
        return
    assert all(rows)


def test_digest_is_compared_in_records_spelling() -> None:
    row = RecordRow("sha256", EMPTY, 0)
    check_digest(row, hashlib.sha256().digest(), where="test", path="a")
    with pytest.raises(RecordHashMismatch):
        check_digest(row, hashlib.sha256(b"x").digest(), where="test", path="a")
