"""From a path or a URL to the store it names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from kernel_depot.store.blobs import Store
from kernel_depot.store.errors import StoreLocationInvalid


def open_store(location: str | Path, *, staging_dir: Path) -> Store:
    """Open the store at a path, a `file:` URL or `s3://bucket/prefix?endpoint=...&region=...`.

    `staging_dir` holds private files on their way to a store that is not a directory. Credentials of S3
    come from the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), or from the URL's user part.
    Raise StoreLocationInvalid, StoreUnreachable.
    """
    text = str(location)
    parts = urlsplit(text)
    if isinstance(location, Path) or parts.scheme == "":
        from kernel_depot.store.local import LocalStore

        return LocalStore(Path(location))
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        from kernel_depot.store.local import LocalStore

        return LocalStore(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.hostname:
        from kernel_depot.store.s3 import S3Store

        return S3Store(text, staging_dir=staging_dir)
    raise StoreLocationInvalid(
        "the store's location is not understood",
        where=f"{parts.scheme}://{parts.hostname or ''}{parts.path}",
        expected="a directory, file:///directory, or s3://bucket/prefix?endpoint=URL",
        remedy="set KERNEL_DEPOT_STORE_URL or --store-url",
    )
