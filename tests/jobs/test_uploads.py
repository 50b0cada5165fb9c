"""Uploads into both kinds of depot: resumed, checked, shared parts, left behind, and never half there."""

from __future__ import annotations

import errno
import hashlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from sqlmodel import col, select

from kernel_depot.catalog import record
from kernel_depot.catalog.database import reading, writing
from kernel_depot.catalog.tables import Blob, Upload, UploadPart
from kernel_depot.jobs import uploads
from kernel_depot.jobs.depot import Depot
from kernel_depot.jobs.materialize import Failed, Ingested, materialize_wheel
from kernel_depot.jobs.uploads import PART, Receiving, Stored
from kernel_depot.pins.pin import Pin, StoreOrigin
from kernel_depot.platform import Arch, CudaTag
from kernel_depot.store.blobs import Form, StagedBlob


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def part(data: bytes, number: int) -> bytes:
    return data[number * PART : (number + 1) * PART]


def begin(depot: Depot, data: bytes, **changed: Any) -> uploads.Progress:
    given = {"sha256": digest(data), "size": len(data), "begun_by": "me", **changed}
    return uploads.begin(depot.engine, depot.store, settings=depot.settings, **given)


def take(depot: Depot, data: bytes, number: int, *, of: str | None = None, said: str | None = None) -> None:
    uploads.take_part(
        depot.engine,
        depot.store,
        sha256=of or digest(data),
        number=number,
        data=part(data, number),
        digest=said,
    )


def complete(depot: Depot, data: bytes) -> Stored:
    return uploads.complete(depot.engine, depot.store, digest(data))


def left(depot: Depot) -> tuple[list[str], list[str], list[str]]:
    """What there is of uploads: rows, rows of parts, parts."""
    with reading(depot.engine) as session:
        rows = list(session.exec(select(Upload.sha256)))
        parts = list(session.exec(select(UploadPart.sha256)))
    return rows, parts, list(depot.store.list(form=Form.PART))


def test_parts_in_any_order_become_a_blob(depot: Depot) -> None:
    data = os.urandom(2 * PART + 5)
    assert begin(depot, data) == Receiving(digest(data), len(data), (0, 1, 2))
    take(depot, data, 2)
    take(depot, data, 0)
    take(depot, data, 0, said=digest(part(data, 0)))
    assert begin(depot, data) == Receiving(digest(data), len(data), (1,))
    with pytest.raises(uploads.UploadIncomplete) as caught:
        complete(depot, data)
    assert caught.value.data["missing"] == [1]
    assert not depot.store.has([digest(data)])
    take(depot, data, 1)
    assert complete(depot, data) == Stored(digest(data), len(data))
    assert b"".join(depot.store.read(digest(data))) == data
    assert left(depot) == ([], [], [])
    assert begin(depot, data) == complete(depot, data) == Stored(digest(data), len(data))
    with reading(depot.engine) as session:
        assert session.get_one(Blob, digest(data)).size == len(data)


def test_bytes_that_are_not_the_announced_ones_are_thrown_away(embedded: Depot) -> None:
    data = os.urandom(PART + 1)
    announced = digest(b"other")
    begin(embedded, data, sha256=announced)
    take(embedded, data, 0, of=announced)
    take(embedded, data, 1, of=announced)
    with pytest.raises(uploads.UploadMismatch) as caught:
        uploads.complete(embedded.engine, embedded.store, announced)
    assert (caught.value.expected, caught.value.found) == (announced, digest(data))
    assert left(embedded) == ([], [], [])
    assert list(embedded.store.list()) == []
    with reading(embedded.engine) as session:
        assert session.exec(select(Blob)).all() == []


def test_what_cannot_be_a_part_is_refused(embedded: Depot) -> None:
    data = os.urandom(PART + 1)
    with pytest.raises(uploads.UploadUnknown):
        take(embedded, data, 0)
    begin(embedded, data)
    with pytest.raises(uploads.UploadPartRefused, match="no such part"):
        take(embedded, data, 2)
    with pytest.raises(uploads.UploadPartRefused, match="length"):
        take(embedded, data[:-1], 1, of=digest(data))
    with pytest.raises(uploads.UploadPartRefused, match="on its way"):
        take(embedded, data, 0, said="0" * 64)
    assert left(embedded) == ([digest(data)], [], [])


def test_one_digest_has_one_size(embedded: Depot) -> None:
    data = os.urandom(100)
    begin(embedded, data)
    with pytest.raises(uploads.UploadSizeDiffers):
        begin(embedded, data, size=99)
    take(embedded, data, 0)
    complete(embedded, data)
    with pytest.raises(uploads.UploadSizeDiffers):
        begin(embedded, data, size=99)
    with pytest.raises(uploads.UploadTooLarge):
        begin(embedded, data, size=embedded.settings.max_wheel_bytes + 1)


def test_uploads_that_share_a_part_do_not_take_it_from_each_other(embedded: Depot) -> None:
    same = os.urandom(PART)
    one, two = same + b"one", same + b"two"
    for data in (one, two):
        begin(embedded, data)
        take(embedded, data, 0)
        take(embedded, data, 1)
    complete(embedded, one)
    complete(embedded, two)
    assert embedded.store.has([digest(one), digest(two)]) == {digest(one), digest(two)}
    assert left(embedded) == ([], [], [])


def test_a_part_that_is_gone_is_asked_for_again(embedded: Depot) -> None:
    data = os.urandom(PART + 1)
    begin(embedded, data)
    take(embedded, data, 0)
    take(embedded, data, 1)
    embedded.store.delete(digest(part(data, 1)), form=Form.PART)
    with pytest.raises(uploads.UploadIncomplete) as caught:
        complete(embedded, data)
    assert caught.value.data["missing"] == [1]
    take(embedded, data, 1)
    complete(embedded, data)


def test_a_full_disk_is_told_and_the_upload_goes_on(embedded: Depot, monkeypatch: Any) -> None:
    data = os.urandom(100)
    begin(embedded, data)

    def full(staged: StagedBlob, *, form: Form = Form.IDENTITY) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(staged.path))

    with monkeypatch.context() as patch:
        patch.setattr(embedded.store, "publish", full)
        with pytest.raises(uploads.UploadNoRoom) as caught:
            take(embedded, data, 0)
    assert caught.value.status == 507
    assert begin(embedded, data) == Receiving(digest(data), 100, (0,))
    take(embedded, data, 0)
    complete(embedded, data)


def test_what_nobody_comes_back_for_is_forgotten(embedded: Depot, tmp_path: Path) -> None:
    old, new = os.urandom(50), os.urandom(60)
    for data in (old, new):
        begin(embedded, data)
        take(embedded, data, 0)
    with writing(embedded.engine) as session:
        session.connection().execute(
            update(Upload)
            .where(col(Upload.sha256) == digest(old))
            .values(touched_at=record.now() - timedelta(days=8))
        )
    assert uploads.remove_abandoned(embedded.engine, embedded.store) == 1
    assert left(embedded) == ([digest(new)], [digest(new)], [digest(new)])


def stored_pin(wheel: Path) -> Pin:
    return Pin(
        project="flashinfer_cubin",
        version="1.0",
        filename=wheel.name,
        sha256=digest(wheel.read_bytes()),
        cuda=CudaTag(13, 0),
        arch=Arch.X86_64,
        sm=None,
        origin=StoreOrigin(),
    )


def test_an_uploaded_wheel_is_brought_in_from_the_store(depot: Depot, make_wheel: Any) -> None:
    content = os.urandom(PART)
    wheel = make_wheel({"flashinfer_cubin/cubins/x.h": content})
    pin = stored_pin(wheel)
    absent = materialize_wheel(depot, pin)
    assert isinstance(absent, Failed)
    assert absent.problem["type"].endswith(":wheel-not-uploaded")
    data = wheel.read_bytes()
    begin(depot, data)
    for number in range(-(-len(data) // PART)):
        take(depot, data, number)
    complete(depot, data)
    outcome = materialize_wheel(depot, pin)
    assert isinstance(outcome, Ingested), outcome
    assert outcome.downloaded == 0
    assert depot.store.has([digest(content), pin.sha256]) == {digest(content), pin.sha256}
    assert list(depot.incoming.iterdir()) == []


def test_a_wheel_that_was_damaged_in_the_store_is_not_brought_in(embedded: Depot, make_wheel: Any) -> None:
    wheel = make_wheel({"flashinfer_cubin/cubins/x.h": b"x"})
    data = wheel.read_bytes()
    begin(embedded, data)
    take(embedded, data, 0)
    complete(embedded, data)
    path = embedded.store.path(digest(data))
    assert path is not None
    path.chmod(0o644)
    path.write_bytes(data[:-1] + b"!")
    outcome = materialize_wheel(embedded, stored_pin(wheel))
    assert isinstance(outcome, Failed)
    assert "wheel" in outcome.problem["type"]
