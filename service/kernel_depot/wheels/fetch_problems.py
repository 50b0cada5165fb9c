"""Every way a download can fail, each with its own stable slug."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from kernel_depot.wheels.errors import WheelError


def shown(url: str) -> str:
    """Return `url` fit for logs and messages: without credentials, query (signatures) and fragment."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port
    except ValueError:
        return "(a URL that cannot be read)"
    if ":" in host:
        host = f"[{host}]"
    netloc = host if port is None else f"{host}:{port}"
    return urlunsplit((parts.scheme, netloc, parts.path, "", ""))


class FetchError(WheelError):
    """A download that failed; `retryable` tells whether trying again can help."""

    slug = "fetch-failed"
    title = "Download failed"
    status = 502

    def __init__(
        self, what: str, *, retryable: bool = False, retry_after: float | None = None, **facts: Any
    ) -> None:
        super().__init__(what, **facts)
        self.retryable = retryable
        self.retry_after = retry_after


class UrlRefused(FetchError):
    """A URL that no download may be made from."""

    slug = "url-refused"
    title = "URL refused"
    status = 400


class FileUrlNotAllowed(UrlRefused):
    """A `file:` URL while the setting forbids them."""

    slug = "file-url-not-allowed"
    title = "file: URLs are not allowed"
    status = 403


class FileUnreadable(FetchError):
    """A `file:` URL whose file cannot be read or is no regular file."""

    slug = "file-unreadable"
    title = "Local file unreadable"
    status = 404


class HostNotAllowed(FetchError):
    """A host outside the allowed ones."""

    slug = "host-not-allowed"
    title = "Host not allowed"
    status = 403


class AddressRefused(FetchError):
    """A host that resolves to an address downloads must not reach."""

    slug = "address-refused"
    title = "Network address refused"
    status = 403


class RedirectRefused(FetchError):
    """A redirect to somewhere not allowed, to nowhere, or one too many."""

    slug = "redirect-refused"
    title = "Redirect refused"


class UpstreamUnreachable(FetchError):
    """No connection: name resolution, refused, reset, proxy."""

    slug = "upstream-unreachable"
    title = "Upstream unreachable"

    def __init__(self, what: str, *, retryable: bool = True, **facts: Any) -> None:
        super().__init__(what, retryable=retryable, **facts)


class UpstreamUntrusted(FetchError):
    """TLS could not establish who answers."""

    slug = "upstream-untrusted"
    title = "Upstream not trusted"


class ProxyUnusable(FetchError):
    """The environment names a proxy that cannot be used."""

    slug = "proxy-unusable"
    title = "Proxy unusable"
    status = 500


class CaBundleUnusable(FetchError):
    """The file of certificate authorities is absent or no such file."""

    slug = "ca-bundle-unusable"
    title = "CA bundle unusable"
    status = 500


class UpstreamStatus(FetchError):
    """An HTTP status that is not the file."""

    slug = "upstream-status"
    title = "Upstream answered with an error"


class UpstreamInvalid(FetchError):
    """An answer that contradicts the request or itself."""

    slug = "upstream-invalid"
    title = "Upstream answered nonsense"


class UpstreamDropped(FetchError):
    """The body ended before its announced end."""

    slug = "upstream-dropped"
    title = "Download broke off"

    def __init__(self, what: str, **facts: Any) -> None:
        super().__init__(what, retryable=True, **facts)


class DownloadTimeout(FetchError):
    """Connecting, reading or the whole download took too long."""

    slug = "download-timeout"
    title = "Download timed out"
    status = 504


class WheelTooLarge(FetchError):
    """More bytes than the limit."""

    slug = "wheel-too-large"
    title = "Wheel too large"
    status = 413


class WheelSizeMismatch(FetchError):
    """Another number of bytes than the pin says."""

    slug = "wheel-size-mismatch"
    title = "Wheel has the wrong size"


class WheelHashMismatch(FetchError):
    """Bytes whose SHA-256 is not the pin's."""

    slug = "wheel-hash-mismatch"
    title = "Wheel does not match its pin"


class WheelNotUploaded(FetchError):
    """A wheel pinned as one of the depot's own that its store does not hold."""

    slug = "wheel-not-uploaded"
    title = "The wheel was not uploaded"
    status = 404


class DiskFull(FetchError):
    """No room for the download."""

    slug = "disk-full"
    title = "Disk full"
    status = 507


class IncomingUnwritable(FetchError):
    """The directory for downloads cannot be written."""

    slug = "incoming-unwritable"
    title = "Download directory unwritable"
    status = 500
