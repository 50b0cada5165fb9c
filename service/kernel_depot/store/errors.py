"""What can go wrong with the store."""

from __future__ import annotations

from kernel_depot.errors import DepotError


class StoreError(DepotError):
    """The root of the store's failures."""

    slug = "store-failed"
    title = "The store failed"
    status = 503


class StoreLocationInvalid(StoreError):
    """A store URL that names no kind of store we know."""

    slug = "store-location-invalid"
    title = "Not a store location"
    status = 400


class StoreUnreachable(StoreError):
    """The object storage or the directory does not answer."""

    slug = "store-unreachable"
    title = "The store cannot be reached"


class BlobMissing(StoreError):
    """Bytes that the store does not hold."""

    slug = "blob-missing"
    title = "The store does not hold this blob"
    status = 404
