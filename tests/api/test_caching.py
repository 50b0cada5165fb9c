from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.api.caching import (
    ByteRange,
    NotAcceptable,
    PreconditionFailed,
    RangeNotSatisfiable,
    blob_etag,
    choose_form,
    not_modified,
    repr_digest,
    requested_range,
    tags_match,
)
from kernel_depot.store.blobs import Form

ETAG = '"' + "ab" * 32 + '"'


def asked(value: str, size: int, if_range: str | None = None) -> ByteRange | None:
    headers = {"range": value} | ({"if-range": if_range} if if_range is not None else {})
    return requested_range(headers, etag=ETAG, size=size)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**6))
def test_first_and_last_select_what_slicing_selects(first: int, last: int, size: int) -> None:
    wanted = range(size)[first : last + 1] if first <= last else range(0)
    if not wanted:
        with pytest.raises(RangeNotSatisfiable) as refused:
            asked(f"bytes={first}-{last}", size)
        assert refused.value.headers["content-range"] == f"bytes */{size}"
    else:
        found = asked(f"bytes={first}-{last}", size)
        assert found is not None
        assert (found.start, found.end) == (wanted.start, wanted.stop)
        assert found.content_range == f"bytes {wanted[0]}-{wanted[-1]}/{size}"


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_suffix_selects_the_last_bytes(count: int, size: int) -> None:
    if count == 0:
        with pytest.raises(RangeNotSatisfiable):
            asked("bytes=-0", size)
    else:
        assert asked(f"bytes=-{count}", size) == ByteRange(max(0, size - count), size, size)


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_open_range_runs_to_the_end(first: int, size: int) -> None:
    if first >= size:
        with pytest.raises(RangeNotSatisfiable):
            asked(f"bytes={first}-", size)
    else:
        assert asked(f"bytes={first}-", size) == ByteRange(first, size, size)


@given(st.text(alphabet="0123456789-,= \tbytesx*", max_size=60), st.integers(0, 10**9))
def test_any_range_header_is_a_sound_range_or_the_whole_or_refused(value: str, size: int) -> None:
    try:
        found = asked(value, size)
    except RangeNotSatisfiable:
        return
    assert found is None or 0 <= found.start < found.end <= size


@pytest.mark.parametrize("value", ["bytes=0-1,4-5", "bytes=0-0, -1", "bytes=0-,0-,0-"])
def test_several_ranges_are_refused(value: str) -> None:
    with pytest.raises(RangeNotSatisfiable, match="several"):
        asked(value, 100)


@pytest.mark.parametrize(
    "value", ["bytes=", "bytes=-", "bytes=a-b", "bytes=1", "bytes=5-2", "bytes=+1-2", "bytes=1--2", "bytes=,"]
)
def test_malformed_ranges_are_refused(value: str) -> None:
    with pytest.raises(RangeNotSatisfiable):
        asked(value, 100)


@pytest.mark.parametrize("value", ["items=0-1", "bytes", "bytes 0-1", ""])
def test_other_units_ask_for_the_whole(value: str) -> None:
    assert asked(value, 100) is None


def test_unit_is_case_insensitive_and_empty_elements_are_skipped() -> None:
    assert asked("Bytes=, 2-3 ,", 100) == ByteRange(2, 4, 100)


def test_numbers_of_any_length_are_read() -> None:
    assert asked("bytes=" + "0" * 6000 + "1-" + "9" * 6000, 10) == ByteRange(1, 10, 10)
    with pytest.raises(RangeNotSatisfiable):
        asked("bytes=" + "9" * 6000 + "-", 10)


def test_nothing_of_an_empty_blob_can_be_asked_for() -> None:
    for value in ("bytes=0-", "bytes=0-0", "bytes=-1"):
        with pytest.raises(RangeNotSatisfiable):
            asked(value, 0)


@pytest.mark.parametrize(
    ("condition", "ranged"),
    [(ETAG, True), ("W/" + ETAG, False), ('"other"', False), ("Tue, 01 Dec 2026 00:00:00 GMT", False)],
)
def test_if_range_holds_only_for_the_strong_tag(condition: str, ranged: bool) -> None:
    assert (asked("bytes=0-1", 10, condition) is not None) is ranged


def test_if_range_that_fails_makes_even_a_bad_range_moot() -> None:
    assert asked("bytes=99-", 10, '"other"') is None


opaque = st.text(alphabet=st.characters(min_codepoint=0x21, max_codepoint=0xFF, exclude_characters='"\x7f'))


@given(st.lists(st.tuples(st.booleans(), opaque)), opaque)
def test_tag_lists_match_weakly_and_strongly(tags: list[tuple[bool, str]], own: str) -> None:
    tags = [(weak, tag) for weak, tag in tags if not any(0x80 > ord(c) > 0x7E for c in tag)]
    header = ", ".join(("W/" if weak else "") + f'"{tag}"' for weak, tag in tags)
    own = "".join(c for c in own if not 0x7F <= ord(c) < 0x80)
    etag = f'"{own}"'
    assert tags_match(header, etag, strong=False) == any(tag == own for _, tag in tags)
    assert tags_match(header, etag, strong=True) == any(tag == own and not weak for weak, tag in tags)


def test_star_matches_everything_and_malformed_lists_nothing() -> None:
    assert tags_match(" * ", ETAG, strong=True)
    for malformed in (ETAG[1:-1], f"{ETAG} {ETAG}", f"{ETAG}, x", "", f"w/{ETAG}", f'"*", *, {ETAG}'):
        assert not tags_match(malformed, ETAG, strong=False)
    assert tags_match(f'"a,b" ,, W/{ETAG},', ETAG, strong=False)


def test_preconditions_are_evaluated_in_their_order() -> None:
    assert not_modified({"if-none-match": "W/" + ETAG}, ETAG)
    assert not not_modified({"if-none-match": '"other"'}, ETAG)
    assert not not_modified({}, ETAG)
    assert not not_modified({"if-match": ETAG}, ETAG)
    with pytest.raises(PreconditionFailed):
        not_modified({"if-match": "W/" + ETAG, "if-none-match": "*"}, ETAG)


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (None, Form.IDENTITY),
        ("", Form.IDENTITY),
        ("zstd", Form.ZSTD),
        ("ZSTD;Q=0.5", Form.ZSTD),
        ("gzip, deflate, br, zstd", Form.ZSTD),
        ("gzip", Form.IDENTITY),
        ("zstd;q=0", Form.IDENTITY),
        ("zstd;q=0.000, *", Form.IDENTITY),
        ("zstd;q=0.5, identity", Form.IDENTITY),
        ("zstd;q=0.5, identity;q=0.5", Form.ZSTD),
        ("*", Form.ZSTD),
        ("identity;q=0, *", Form.ZSTD),
        ("zstd;q=2", Form.IDENTITY),
        ("zstd;q=0.1234", Form.IDENTITY),
    ],
)
def test_coding_follows_the_qualities(accept: str | None, form: Form) -> None:
    assert choose_form(accept, zstd_kept=True) is form
    if accept != "identity;q=0, *":
        assert choose_form(accept, zstd_kept=False) is Form.IDENTITY


@pytest.mark.parametrize("accept", ["identity;q=0", "*;q=0", "zstd;q=0, *;q=0", "gzip, identity;q=0.0"])
def test_excluding_every_form_is_said(accept: str) -> None:
    with pytest.raises(NotAcceptable):
        choose_form(accept, zstd_kept=True)
    with pytest.raises(NotAcceptable):
        choose_form("identity;q=0, zstd", zstd_kept=False)


def test_names_of_forms_and_digests() -> None:
    sha256 = hashlib.sha256(b"kernel")
    assert blob_etag(sha256.hexdigest(), Form.IDENTITY) == f'"{sha256.hexdigest()}"'
    assert blob_etag(sha256.hexdigest(), Form.ZSTD) == f'"{sha256.hexdigest()}-zstd"'
    encoded = repr_digest(sha256.hexdigest()).removeprefix("sha-256=:").removesuffix(":")
    assert base64.b64decode(encoded) == sha256.digest()
