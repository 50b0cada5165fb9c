"""Download one pinned file: hashed while it streams, resumed after a drop, published whole or not at all."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from kernel_depot.digest import sha256_file
from kernel_depot.wheels.fetch_problems import (
    DiskFull,
    DownloadTimeout,
    FetchError,
    FileUnreadable,
    FileUrlNotAllowed,
    UpstreamDropped,
    UpstreamInvalid,
    UrlRefused,
    WheelHashMismatch,
    WheelSizeMismatch,
    WheelTooLarge,
    shown,
)
from kernel_depot.wheels.partial import Origin, Partial
from kernel_depot.wheels.policy import FetchPolicy

if TYPE_CHECKING:
    from kernel_depot.wheels.upstream import Answer, Upstream

__all__ = ["FetchPolicy", "Fetched", "fetch"]

OnProgress = Callable[[int, int | None], None]

_log = logging.getLogger(__name__)

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_COPY_RANGE = 64 << 20
_COPY_PIECE = 4 << 20
_REPORT_EVERY = 1 << 20


@dataclass(frozen=True, slots=True)
class Fetched:
    """A verified file. `attempts` counts requests, `resumed_bytes` those not downloaded again."""

    path: Path
    size: int
    attempts: int
    resumed_bytes: int
    url: str


def fetch(
    url: str,
    *,
    sha256: str,
    dest: Path,
    policy: FetchPolicy,
    size: int | None = None,
    on_progress: OnProgress | None = None,
    verify_files: bool = True,
) -> Fetched:
    """Bring the bytes named by `sha256` from `url` to `dest`, which appears only when they are verified.

    `verify_files` False leaves it to the caller to verify what was copied from a `file:` URL.

    `size` is the exact number of bytes where the pin tells it. `on_progress` gets the bytes so far and the
    total if known; an exception it raises ends the download, and what came so far is kept for the next
    call, as after any failure that a later attempt may overcome. Raise a subclass of FetchError.
    """
    if dest.exists():
        if sha256_file(dest) == sha256:
            return Fetched(dest, dest.stat().st_size, attempts=0, resumed_bytes=0, url=shown(url))
        dest.unlink(missing_ok=True)
    job = _Download(url, sha256, dest, policy, size, on_progress)
    if url[:5].lower() == "file:":
        return job.copy(verify=verify_files)
    return job.download()


class _Download:
    """One call of `fetch`: what was asked and how far it got."""

    def __init__(
        self,
        url: str,
        sha256: str,
        dest: Path,
        policy: FetchPolicy,
        size: int | None,
        on_progress: OnProgress | None,
    ) -> None:
        self.url = url
        self.sha256 = sha256
        self.dest = dest
        self.policy = policy
        self.size = size
        self.limit = policy.max_bytes if size is None else size
        self.report = on_progress or (lambda _done, _total: None)
        self.deadline = time.monotonic() + policy.total_timeout
        self.requests = 0
        self.failures = 0
        self.mark = 0
        self.resumed = 0

    @property
    def where(self) -> str:
        return shown(self.url)

    def download(self) -> Fetched:
        # Not at the top: a local file needs no TLS and no HTTP client.
        from kernel_depot.wheels.upstream import Upstream, check_url

        check_url(self.url, self.policy)
        with Partial.open(self.dest, url=self.where) as part, Upstream(self.policy) as upstream:
            try:
                if part.size > self.limit:
                    part.restart()
                self.resumed = self.mark = part.size
                self._stream(part, upstream)
                if part.sha256 != self.sha256 and part.pieced:
                    # The seam may be the fault: the file changed upstream, or the partial was torn.
                    part.restart()
                    self.resumed = self.mark = 0
                    self._stream(part, upstream)
                self._verify(part)
            except (WheelHashMismatch, WheelTooLarge, WheelSizeMismatch, DiskFull):
                part.discard()
                raise
            size = part.size
            part.publish(self.dest)
        return Fetched(self.dest, size, self.requests, self.resumed, self.where)

    def _verify(self, part: Partial) -> None:
        if part.sha256 == self.sha256:
            return
        raise WheelHashMismatch(
            "the downloaded file is not the pinned one",
            where=self.where,
            expected=self.sha256,
            found=part.sha256,
            remedy="check the pin's hash and URL; if both are right, upstream replaced the file",
            size=part.size,
        )

    def _stream(self, part: Partial, upstream: Upstream) -> None:
        """Ask until the whole body is there, waiting between failures that another attempt may overcome."""
        from tenacity import Retrying, retry_if_exception, stop_never

        for attempt in Retrying(
            retry=retry_if_exception(lambda error: self._worth_retrying(error, part)),
            wait=lambda state: self._pause(state.outcome.exception() if state.outcome is not None else None),
            stop=stop_never,
            reraise=True,
        ):
            with attempt:
                if part.origin is None or part.size != part.origin.length:
                    self._request(part, upstream)

    def _worth_retrying(self, error: BaseException, part: Partial) -> bool:
        """Decide whether another attempt may help; progress since the last failure earns new attempts."""
        if not isinstance(error, FetchError) or not error.retryable:
            return False
        if part.size >= self.mark + self.policy.progress_bytes:
            self.failures = 0
        self.mark = max(self.mark, part.size)
        self.failures += 1
        pause = error.retry_after or 0.0
        return (
            self.failures < self.policy.attempts
            and pause <= self.policy.retry_after_max
            and time.monotonic() + pause < self.deadline
        )

    def _pause(self, error: BaseException | None) -> float:
        """Return the seconds to wait: what upstream asked for, else doubling; always with a random part."""
        asked = error.retry_after if isinstance(error, FetchError) else None
        doubled = self.policy.backoff_initial * 2.0 ** (self.failures - 1)
        seconds = asked if asked is not None else min(doubled, self.policy.backoff_max)
        seconds += random.uniform(0, self.policy.backoff_jitter)  # noqa: S311
        _log.info("attempt %d failed, next in %.1f s: %s", self.requests, seconds, error)
        return seconds

    def _request(self, part: Partial, upstream: Upstream) -> None:
        """One request and its body, appended to the partial or begun anew."""
        self._check_time()
        headers = {}
        validator = part.origin.validator if part.origin is not None else None
        if part.size and validator is not None:
            headers = {"Range": f"bytes={part.size}-", "If-Range": validator}
        elif part.size:
            part.restart()
        self.requests += 1
        with upstream.get(self.url, headers, accept=frozenset({200, 206, 416})) as answer:
            if answer.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
                raise UpstreamInvalid(
                    "upstream encoded the body though identity was asked for",
                    where=shown(answer.url),
                    found=answer.headers["content-encoding"],
                )
            total = self._begin(part, answer, asked=bool(headers))
            self._check_room(part, total)
            reported = 0
            for piece in answer.pieces():
                if part.size + len(piece) > self.limit:
                    raise self._too_large(part.size + len(piece), at_least=True)
                part.write(piece)
                self._check_time()
                if part.size - reported >= _REPORT_EVERY:
                    reported = part.size
                    self.report(part.size, total)
            self.report(part.size, total)
            if total is not None and part.size < total:
                raise UpstreamDropped(
                    "the body ended early", where=shown(answer.url), expected=total, found=part.size
                )

    def _begin(self, part: Partial, answer: Answer, *, asked: bool) -> int | None:
        """Check an answer's head, make the partial ready for its body, and return the whole file's length."""
        where = shown(answer.url)
        if answer.status == 416 or (answer.status == 206 and not asked):
            part.restart()
            raise UpstreamInvalid(
                f"upstream answered {answer.status} to this request", where=where, retryable=asked
            )
        if answer.status == 206:
            known = part.origin.length if part.origin is not None else None
            total = self._continued(part, answer)
            if total is None or (known is not None and total != known):
                part.restart()
                raise UpstreamInvalid(
                    "upstream sent another range than the one asked for",
                    where=where,
                    found=answer.headers.get("content-range", "no Content-Range"),
                    retryable=True,
                )
            self._check_length(total)
            part.pieced = True
            return total
        length = answer.headers.get("content-length", "")
        total = int(length) if length.isascii() and length.isdigit() else None
        if total is not None:
            self._check_length(total)
        self.resumed = 0
        part.restart(
            Origin(self.where, answer.headers.get("etag"), answer.headers.get("last-modified"), total)
        )
        return total if total is not None else self.size

    def _continued(self, part: Partial, answer: Answer) -> int | None:
        """Return the whole length that a 206 announces, None when it is not the rest of our file."""
        match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", "").strip())
        etag = answer.headers.get("etag")
        changed = part.origin is not None and part.origin.etag and etag and etag != part.origin.etag
        if match is None or int(match[1]) != part.size or changed:
            return None
        total = int(match[2]) + 1 if match[3] == "*" else int(match[3])
        return total if int(match[2]) + 1 == total else None

    def _check_length(self, total: int) -> None:
        if self.size is not None and total != self.size:
            raise WheelSizeMismatch(
                "upstream's file has another size than the pin says",
                where=self.where,
                expected=self.size,
                found=total,
                remedy="check the pin's size and URL",
            )
        if total > self.limit:
            raise self._too_large(total, at_least=False)

    def _too_large(self, found: int, *, at_least: bool) -> FetchError:
        if self.size is not None:
            return WheelSizeMismatch(
                "upstream sends more bytes than the pin says",
                where=self.where,
                expected=self.size,
                found=f"at least {found}",
                remedy="check the pin's size and URL",
            )
        return WheelTooLarge(
            "the file is larger than downloads may be",
            where=self.where,
            expected=f"at most {self.limit}",
            found=f"at least {found}" if at_least else found,
            remedy="name the size in the pin, or raise the setting max_wheel_bytes",
        )

    def _check_room(self, part: Partial, total: int | None) -> None:
        needed = 0 if total is None else total - part.size
        free = shutil.disk_usage(self.dest.parent).free
        if needed > free:
            raise DiskFull(
                "the disk has no room for this download",
                where=str(self.dest.parent),
                expected=f"{needed} bytes free",
                found=f"{free} bytes free",
                remedy="free space or point the data directory at a larger disk",
            )

    def _check_time(self) -> None:
        if time.monotonic() >= self.deadline:
            raise DownloadTimeout(
                f"the download took longer than {self.policy.total_timeout:g} s",
                where=self.where,
                remedy="run it again to go on from here, or raise the total timeout",
            )

    def copy(self, *, verify: bool) -> Fetched:
        """Copy a `file:` URL's bytes, hashed in a second thread while they are written, or not at all."""
        source = self._local_path()
        try:
            # O_NONBLOCK: a FIFO must be refused, not waited for.
            descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise self._unreadable(str(error)) from error
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            os.close(descriptor)
            raise self._unreadable("not a regular file")
        with open(descriptor, "rb", buffering=0) as file:
            self._check_length(facts.st_size)
            with Partial.open(self.dest, url=self.where) as part:
                try:
                    part.restart()
                    self._check_room(part, facts.st_size)
                    if verify:
                        self._copy(file, part, facts.st_size)
                        self._verify(part)
                    else:
                        self._copy_range(file, part, facts.st_size)
                except BaseException:
                    part.discard()
                    raise
                size = part.size
                part.publish(self.dest)
        return Fetched(self.dest, size, attempts=1, resumed_bytes=0, url=self.where)

    def _copy(self, file: FileIO, part: Partial, total: int) -> None:
        view = memoryview(bytearray(_COPY_PIECE))
        with ThreadPoolExecutor(1) as hasher:
            while count := file.readinto(view):
                if part.size + count > self.limit:
                    raise self._too_large(part.size + count, at_least=True)
                part.write(view[:count], hasher=hasher)
                self.report(part.size, total)
                self._check_time()

    def _copy_range(self, file: FileIO, part: Partial, total: int) -> None:
        """Copy within the kernel, which also shares blocks where the file system can."""
        while part.copy(file, _COPY_RANGE):
            if part.size > self.limit:
                raise self._too_large(part.size, at_least=True)
            self.report(part.size, total)
            self._check_time()

    def _local_path(self) -> str:
        if not self.policy.allow_file_urls:
            raise FileUrlNotAllowed(
                "this service does not read file: URLs",
                where=self.where,
                remedy="set allow_file_urls (on the command line --allow-file-urls) if you mean it",
            )
        try:
            parts = urlsplit(self.url)
        except ValueError as error:
            raise UrlRefused(f"the URL cannot be read: {error}") from error
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
            raise UrlRefused(
                "the file: URL names no absolute path on this machine",
                where=self.where,
                expected="file:///absolute/path",
                found=self.url,
            )
        return path

    def _unreadable(self, why: str) -> FetchError:
        return FileUnreadable(f"the file cannot be read: {why}", where=self.where)
