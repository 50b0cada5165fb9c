"""Answers that let another send a blob's bytes: a signed URL of S3, or nginx over the store's directory."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from kernel_depot.settings import Settings
from kernel_depot.store.blobs import Form, Store

SENDFILE = "x-sendfile-type"
"""nginx says with it that it understands X-Accel-Redirect; it replaces what a client sent."""

_ACCEL = "X-Accel-Redirect"


def redirect(store: Store, settings: Settings, sha256: str) -> Response | None:
    """Return a 307 to the blob's signed URL; None where the store has none, or the setting is off.

    The URL is a secret for as long as it lives, so that no cache may keep it beyond that. Object storage
    sends the identity bytes: a redirect has no headers that could say that they are another form.
    """
    seconds = settings.signed_url_seconds
    url = store.presign(sha256, expires=seconds) if seconds else None
    if url is None:
        return None
    return Response(status_code=307, headers={"location": url, "cache-control": "no-store"})


def handed_over(
    request: Request,
    store: Store,
    settings: Settings,
    sha256: str,
    *,
    form: Form,
    media_type: str,
    headers: dict[str, str],
) -> Response | None:
    """Return an answer without a body for the nginx that asked, which sends the file; None for others.

    nginx does ranges itself. It would judge If-Match without knowing the ETag, so such a request, which
    was judged here, is answered here.
    """
    if settings.accel_prefix is None or request.headers.get(SENDFILE) != _ACCEL:
        return None
    path = store.path(sha256, form=form)
    if path is None or "if-match" in request.headers:
        return None
    place = path.relative_to(store.location).as_posix()
    headers = {name: value for name, value in headers.items() if name != "accept-ranges"}  # nginx adds it
    return Response(
        media_type=media_type, headers={**headers, "x-accel-redirect": f"{settings.accel_prefix}/{place}"}
    )
