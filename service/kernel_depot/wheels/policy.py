"""What downloads are allowed to do, and how long they may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Where the shipped pins' files lie: a release's page, and the hosts its assets are redirected to.
DEFAULT_HOSTS = frozenset(
    {"github.com", "objects.githubusercontent.com", "release-assets.githubusercontent.com"}
)


@dataclass(frozen=True, kw_only=True)
class FetchPolicy:
    """The rules of a download. Times are seconds, sizes bytes.

    `max_bytes` holds where the pin names no size. `allow_private_addresses` lets downloads reach
    loopback, private and link-local addresses, `allow_http` plain http: both for mirrors of your own.
    `trust_env` takes proxies and CA bundles from the environment; `ca_bundle` adds a file of CAs.
    `attempts` are counted since the last progress of `progress_bytes`; between them lie waits that
    double from `backoff_initial` to `backoff_max`, plus a random part up to `backoff_jitter`.
    """

    allowed_hosts: frozenset[str] = DEFAULT_HOSTS
    allow_private_addresses: bool = False
    allow_http: bool = False
    allow_file_urls: bool = False
    trust_env: bool = True
    ca_bundle: Path | None = None
    max_bytes: int = 16 << 30
    max_redirects: int = 5
    connect_timeout: float = 15.0
    read_timeout: float = 60.0
    total_timeout: float = 4 * 3600.0
    attempts: int = 6
    progress_bytes: int = 1 << 20
    backoff_initial: float = 0.5
    backoff_max: float = 30.0
    backoff_jitter: float = 1.0
    retry_after_max: float = 300.0
