"""The server's settings: the one place that reads KERNEL_DEPOT_* from the environment."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kernel_depot.wheels.policy import DEFAULT_HOSTS, FetchPolicy

_INDEX_PREFIX = "KERNEL_DEPOT_INDEX_"


def _indexes() -> dict[str, str]:
    """Collect KERNEL_DEPOT_INDEX_<NAME>=URL; names are compared in lower case."""
    return {
        key[len(_INDEX_PREFIX) :].lower(): value
        for key, value in os.environ.items()
        if key.startswith(_INDEX_PREFIX)
    }


def _ca_bundle() -> Path | None:
    """Return what other clients of this machine are told to trust; httpx itself reads SSL_CERT_FILE."""
    value = os.environ.get("REQUESTS_CA_BUNDLE")
    return Path(value) if value else None


class Settings(BaseSettings):
    """What an administrator can set, each as KERNEL_DEPOT_<NAME>. Sizes are bytes, times seconds."""

    model_config = SettingsConfigDict(env_prefix="KERNEL_DEPOT_", extra="ignore", frozen=True)

    data_dir: Path = Field(default=Path(".depot"), description="Directory of the embedded catalog and store.")
    database_url: str | None = Field(default=None, description="postgresql:// or sqlite:///; None: embedded.")
    store_url: str | None = Field(default=None, description="Directory or s3:// URL; None: embedded.")
    replica: str = Field(default_factory=socket.gethostname, description="Name of this server process.")
    index: dict[str, str] = Field(default_factory=_indexes, description="Index names and their URLs.")

    allow_anonymous: bool = Field(default=False, description="Serve without tokens on loopback.")
    allow_file_urls: bool = Field(default=False, description="Let pins name file: URLs.")
    allow_private_addresses: bool = Field(default=False, description="Let downloads reach private networks.")
    allow_http: bool = Field(default=False, description="Let downloads use plain http, for own mirrors.")
    allowed_hosts: tuple[str, ...] = Field(default=(), description="Download hosts beside the shipped ones.")
    max_wheel_bytes: int = Field(default=16 << 30, gt=0, description="Largest wheel whose pin has no size.")
    fetch_attempts: int = Field(default=6, gt=0, description="How often a download is tried.")
    fetch_connect_timeout: float = Field(default=15.0, gt=0, description="Seconds to connect.")
    fetch_read_timeout: float = Field(default=60.0, gt=0, description="Seconds between two pieces.")
    fetch_total_timeout: float = Field(default=4 * 3600.0, gt=0, description="Seconds for one download.")
    ca_bundle: Path | None = Field(
        default_factory=_ca_bundle,
        description="File or directory of CAs to trust beside the usual ones; default REQUESTS_CA_BUNDLE.",
    )

    signed_url_seconds: int = Field(
        default=0,
        ge=0,
        le=7 * 86400,
        description="Life of the signed URLs that S3 blobs redirect to; 0: none.",
    )
    accel_prefix: str | None = Field(
        default=None,
        pattern=r"^/[A-Za-z0-9/_-]*[A-Za-z0-9_-]$",
        description="nginx's internal location of the store's directory; see docker/nginx.conf.",
    )

    lease_seconds: float = Field(default=30.0, gt=0, description="How long a dead process can block others.")
    extract_threads: int = Field(
        default_factory=lambda: min(os.cpu_count() or 2, 8),
        gt=0,
        description="Threads that unpack one wheel.",
    )

    @field_validator("index", mode="after")
    @classmethod
    def _lower(cls, value: dict[str, str]) -> dict[str, str]:
        return {name.lower(): url for name, url in value.items()}

    @property
    def catalog_url(self) -> str:
        """The database to open."""
        return self.database_url or f"sqlite:///{self.data_dir.absolute()}/catalog.sqlite"

    @property
    def store_location(self) -> str:
        """The store to open."""
        return self.store_url or str(self.data_dir.absolute() / "store")

    def fetch_policy(self, *extra_hosts: str) -> FetchPolicy:
        """Return the download rules; `extra_hosts` are those an index's files turned out to lie on."""
        hosts = {urlsplit(url).hostname for url in self.index.values()}
        return FetchPolicy(
            allowed_hosts=DEFAULT_HOSTS | {*self.allowed_hosts, *extra_hosts} | {h for h in hosts if h},
            allow_private_addresses=self.allow_private_addresses,
            allow_http=self.allow_http,
            allow_file_urls=self.allow_file_urls,
            ca_bundle=self.ca_bundle,
            max_bytes=self.max_wheel_bytes,
            connect_timeout=self.fetch_connect_timeout,
            read_timeout=self.fetch_read_timeout,
            total_timeout=self.fetch_total_timeout,
            attempts=self.fetch_attempts,
        )


def load_settings(**overrides: Any) -> Settings:
    """Read the environment; keyword arguments that are not None win over it."""
    return Settings(**{name: value for name, value in overrides.items() if value is not None})
