"""Preconditions, byte ranges and content negotiation for immutable representations (RFC 9110, RFC 9530)."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kernel_depot.api.problems import ApiError
from kernel_depot.store.blobs import Form

IMMUTABLE = "public, max-age=31536000, immutable"
_ENTITY_TAG = re.compile(r'(?P<weak>W/)?"(?P<opaque>[\x21\x23-\x7e\x80-\xff]*)"')
_TAG = r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"'
_TAG_LIST = re.compile(rf"[ \t,]*{_TAG}(?:[ \t]*,[ \t,]*{_TAG})*[ \t,]*")
_RANGE_SPEC = re.compile(r"(?P<first>[0-9]*)-(?P<last>[0-9]*)")
_CODING = re.compile(
    r"(?P<name>[!#$%&'*+\-.^_`|~0-9A-Za-z]+)"
    r"(?:[ \t]*;[ \t]*[qQ]=(?P<quality>0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?))?"
)


class RangeNotSatisfiable(ApiError):
    """A byte range that cannot be sent: beyond the end, malformed, or several at once."""

    slug = "range-not-satisfiable"
    title = "The byte range cannot be sent"
    status = 416


class NotAcceptable(ApiError):
    """A representation that the client excludes in every form the server has."""

    slug = "not-acceptable"
    title = "No form of this resource is acceptable to the client"
    status = 406


class PreconditionFailed(ApiError):
    """An If-Match that names another representation."""

    slug = "precondition-failed"
    title = "The resource is not the one named in If-Match"
    status = 412


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `start` up to, not including, `end` of a representation of `size` bytes."""

    start: int
    end: int
    size: int

    @property
    def content_range(self) -> str:
        """The Content-Range of a 206 (RFC 9110, 14.4)."""
        return f"bytes {self.start}-{self.end - 1}/{self.size}"


def blob_etag(sha256: str, form: Form) -> str:
    """Return the strong entity tag of one form of a blob."""
    return f'"{sha256}"' if form is Form.IDENTITY else f'"{sha256}-{form.value}"'


def repr_digest(sha256: str) -> str:
    """Return the Repr-Digest of the identity bytes (RFC 9530)."""
    return f"sha-256=:{base64.b64encode(bytes.fromhex(sha256)).decode()}:"


def tags_match(header: str, etag: str, *, strong: bool) -> bool:
    """Tell whether a tag list (`*`, or entity tags) names the strong tag `etag` (RFC 9110, 8.8.3.2).

    A malformed list matches nothing. `strong` leaves weak tags out, as If-Match and If-Range ask for.
    """
    if header.strip(" \t") == "*":
        return True
    if _TAG_LIST.fullmatch(header) is None:
        return False
    opaque = etag[1:-1]
    return any(
        match["opaque"] == opaque and not (strong and match["weak"]) for match in _ENTITY_TAG.finditer(header)
    )


def not_modified(headers: Mapping[str, str], etag: str) -> bool:
    """Tell whether a GET or HEAD is answered 304, evaluating If-Match before If-None-Match.

    Raise PreconditionFailed when If-Match names another representation (RFC 9110, 13.2.2).
    """
    expected = headers.get("if-match")
    if expected is not None and not tags_match(expected, etag, strong=True):
        raise PreconditionFailed(
            "the resource is not the one named in If-Match", where="If-Match", expected=expected, found=etag
        )
    known = headers.get("if-none-match")
    return known is not None and tags_match(known, etag, strong=False)


def requested_range(headers: Mapping[str, str], *, etag: str, size: int) -> ByteRange | None:
    """Return the one byte range a GET asks for, None for the whole representation.

    An If-Range that is not this strong tag, and a unit other than bytes, ask for the whole. Raise
    RangeNotSatisfiable for ranges beyond the end, malformed ones and several at once: RFC 9110, 14.2
    lets a server reject these, and one answer in many parts serves no client of blobs.
    """
    value = headers.get("range")
    if value is None:
        return None
    condition = headers.get("if-range")
    if condition is not None and condition.strip(" \t") != etag:
        return None
    unit, separator, specs = value.partition("=")
    if not separator or unit.strip(" \t").lower() != "bytes":
        return None
    wanted = [spec for spec in (part.strip(" \t") for part in specs.split(",")) if spec]
    if len(wanted) > 1:
        raise _unsatisfiable("one range a request is served, several are refused", value, size)
    match = _RANGE_SPEC.fullmatch(wanted[0]) if wanted else None
    if match is None or (not match["first"] and not match["last"]):
        raise _unsatisfiable("the Range header cannot be read", value, size)
    if not match["first"]:
        length = min(_position(match["last"]), size)
        start, end = size - length, size
    else:
        start = _position(match["first"])
        last = _position(match["last"]) if match["last"] else size
        if match["last"] and last < start:
            raise _unsatisfiable("the range ends before it begins", value, size)
        end = min(last + 1, size)
    if start >= end:
        raise _unsatisfiable("the range lies beyond the end", value, size)
    return ByteRange(start, end, size)


def _position(digits: str) -> int:
    """Read a decimal of any length: what has more digits than any file's size is beyond its end."""
    digits = digits.lstrip("0")
    return int(digits or "0") if len(digits) <= 20 else 10**20


def _unsatisfiable(what: str, found: str, size: int) -> RangeNotSatisfiable:
    return RangeNotSatisfiable(
        what,
        where="Range",
        expected=f"bytes=FIRST-LAST, bytes=FIRST- or bytes=-COUNT within {size} bytes",
        found=found[:200],
        headers={"content-range": f"bytes */{size}", "accept-ranges": "bytes"},
    )


def choose_form(accept_encoding: str | None, *, zstd_kept: bool) -> Form:
    """Pick the form to send (RFC 9110, 12.5.3): zstd when it is kept and liked no less than identity.

    Raise NotAcceptable when the client excludes every kept form. A header that cannot be read asks
    for nothing special.
    """
    if accept_encoding is None:
        return Form.IDENTITY
    qualities: dict[str, float] = {}
    for part in accept_encoding.split(","):
        match = _CODING.fullmatch(part.strip(" \t"))
        if match is not None:
            qualities.setdefault(match["name"].lower(), float(match["quality"] or 1))
    anything = qualities.get("*")
    zstd = qualities.get("zstd", anything or 0.0)
    # Not being listed leaves identity acceptable, behind everything that is listed.
    identity = qualities.get("identity", anything)
    if zstd_kept and zstd > 0 and (identity is None or zstd >= identity):
        return Form.ZSTD
    if identity == 0:
        raise NotAcceptable(
            "every form kept of this resource is excluded by Accept-Encoding",
            where="Accept-Encoding",
            expected="identity or zstd" if zstd_kept else "identity",
            found=accept_encoding[:200],
        )
    return Form.IDENTITY
