from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest

from kernel_depot.liveness import boot_id, is_dead, process_name
from kernel_depot.store.blobs import Form, StagedBlob, Store
from kernel_depot.store.errors import BlobMissing, StoreLocationInvalid, StoreUnreachable
from kernel_depot.store.local import LocalStore
from kernel_depot.store.location import open_store
from kernel_depot.store.zstd_forms import compress, decodes_to


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    location = tmp_path / "store" if request.param == "local" else request.getfixturevalue("s3_url")
    return open_store(location, staging_dir=tmp_path / "outgoing")


def stage(directory: Path, content: bytes, name: str | None = None) -> StagedBlob:
    sha256 = hashlib.sha256(content).hexdigest()
    path = directory / (name or sha256)
    path.write_bytes(content)
    return StagedBlob(sha256, len(content), path)


def put(store: Store, *contents: bytes) -> list[str]:
    with store.staging() as staging:
        blobs = [stage(staging, content, str(number)) for number, content in enumerate(contents)]
        store.publish_many(blobs)
    return [blob.sha256 for blob in blobs]


def test_published_bytes_are_read_back_whole_and_by_range(store: Store) -> None:
    content = os.urandom(3 * (1 << 20) + 17)
    (sha256,) = put(store, content)
    assert store.size(sha256) == len(content)
    pieces = list(store.read(sha256))
    assert b"".join(pieces) == content
    assert max(map(len, pieces)) <= 1 << 20
    assert b"".join(store.read(sha256, start=5)) == content[5:]
    assert b"".join(store.read(sha256, start=1 << 20, end=(1 << 20) + 9)) == content[1 << 20 : (1 << 20) + 9]
    assert b"".join(store.read(sha256, start=9, end=9)) == b""


def test_an_empty_blob_is_a_blob(store: Store) -> None:
    (sha256,) = put(store, b"")
    assert store.size(sha256) == 0
    assert list(store.read(sha256)) == []


def test_a_blob_that_is_not_there(store: Store) -> None:
    absent = "0" * 64
    assert store.size(absent) is None
    assert store.path(absent) is None
    assert store.has([absent]) == set()
    store.delete(absent)
    with pytest.raises(BlobMissing):
        store.read(absent)


def test_many_are_published_listed_and_deleted(store: Store) -> None:
    sha256s = put(store, *(b"%d" % number for number in range(40)))
    assert store.has([*sha256s, "f" * 64]) == set(sha256s)
    assert sorted(store.list()) == sorted(sha256s)
    store.delete(sha256s[0])
    assert set(store.list()) == set(sha256s[1:])
    assert list(store.list(form=Form.ZSTD)) == []


def test_publishing_again_keeps_the_first_and_consumes_the_second(store: Store) -> None:
    put(store, b"same")
    with store.staging() as staging:
        blob = stage(staging, b"same")
        store.publish(blob)
        assert not blob.path.exists()
    assert b"".join(store.read(blob.sha256)) == b"same"


def test_staging_is_gone_afterwards_even_when_work_fails(store: Store) -> None:
    class Oops(Exception):
        pass

    with pytest.raises(Oops), store.staging() as staging:
        (staging / "half").write_bytes(b"half")
        raise Oops
    assert not staging.exists()


def test_a_zstd_form_decodes_to_its_blob_and_lies_apart(store: Store) -> None:
    content = b"kernel " * 100_000
    (sha256,) = put(store, content)
    with store.staging() as staging:
        form = compress(store, sha256, size=len(content), staging=staging)
        assert form is not None
        store.publish(form.staged, form=Form.ZSTD)
    assert store.size(sha256) == len(content)
    assert store.size(sha256, form=Form.ZSTD) == form.staged.size < len(content) * 0.1
    packed = b"".join(store.read(sha256, form=Form.ZSTD))
    assert hashlib.sha256(packed).hexdigest() == form.form_sha256
    assert decodes_to([packed], sha256)
    assert not decodes_to([packed[:-4]], sha256)


def test_bytes_that_do_not_shrink_get_no_zstd_form(store: Store) -> None:
    content = os.urandom(100_000)
    (sha256,) = put(store, content)
    with store.staging() as staging:
        assert compress(store, sha256, size=len(content), staging=staging) is None
        assert list(staging.iterdir()) == []


def test_a_presigned_url_reads_the_blob(s3_url: str, tmp_path: Path) -> None:
    store = open_store(s3_url, staging_dir=tmp_path / "outgoing")
    (sha256,) = put(store, b"signed")
    url = store.presign(sha256, expires=60)
    assert url is not None
    with build_opener(ProxyHandler({})).open(url) as answer:
        assert answer.read() == b"signed"


def test_a_location_shows_no_secret(s3_url: str, tmp_path: Path) -> None:
    assert "secret" not in open_store(s3_url, staging_dir=tmp_path).location


def test_storage_that_does_not_answer(tmp_path: Path) -> None:
    store = open_store("s3://k:s@bucket?endpoint=http://127.0.0.1:9", staging_dir=tmp_path)
    with pytest.raises(StoreUnreachable, match=r"127\.0\.0\.1:9"):
        store.size("0" * 64)


@pytest.mark.parametrize("location", ["ftp://host/x", "s3://", "file://elsewhere/x", "s3://b?endpiont=x"])
def test_locations_that_are_refused(location: str, tmp_path: Path) -> None:
    with pytest.raises(StoreLocationInvalid):
        open_store(location, staging_dir=tmp_path)


def test_published_files_are_read_only(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with store.staging() as staging:
        blob = stage(staging, b"x")
        store.publish(blob)
    path = store.path(blob.sha256)
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o444
    assert path == tmp_path / "blobs" / "sha256" / blob.sha256[:2] / blob.sha256


def test_a_torn_file_under_a_public_name_is_replaced(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (sha256,) = put(store, b"whole")
    path = store.path(sha256)
    assert path is not None
    path.chmod(0o644)
    path.write_bytes(b"who")
    put(store, b"whole")
    assert path.read_bytes() == b"whole"


def test_a_batch_leaves_a_marker_until_it_is_on_the_disk(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    sha256s = put(store, *(b"%d" % number for number in range(10)))
    (marker,) = (tmp_path / "unsynced").iterdir()
    assert marker.name.startswith(boot_id())
    assert json.loads(marker.read_text())["sha256"] == sha256s
    store.settle(older_than=3600)
    assert marker.exists()
    store.settle()
    assert not marker.exists()


def another_boot(marker: Path) -> None:
    marker.rename(marker.with_name("0" * 32 + "." + marker.name.partition(".")[2]))


def test_after_a_crash_of_the_machine_torn_blobs_are_dropped(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    sha256s = put(store, *(b"%d" % number for number in range(10)))
    (marker,) = (tmp_path / "unsynced").iterdir()
    another_boot(marker)
    for sha256, torn in ((sha256s[3], b""), (sha256s[4], b"\0")):
        path = store.path(sha256)
        assert path is not None
        path.chmod(0o644)
        path.write_bytes(torn)
    store.delete(sha256s[5])
    found = LocalStore(tmp_path).recover()
    assert found.dropped == (sha256s[3], sha256s[4])
    assert found.rehashed == 9
    assert set(store.list()) == set(sha256s) - set(sha256s[3:6])
    assert not marker.exists()
    assert LocalStore(tmp_path).recover().rehashed == 0


def test_after_a_crash_of_the_machine_torn_zstd_forms_are_dropped(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    contents = [b"%d" % number * 1000 for number in range(6)]
    sha256s = put(store, *contents)
    store.settle()
    with store.staging() as staging:
        forms = [
            compress(store, s, size=len(c), staging=staging) for s, c in zip(sha256s, contents, strict=True)
        ]
        store.publish_many([form.staged for form in forms if form is not None], form=Form.ZSTD)
    (marker,) = (tmp_path / "unsynced").iterdir()
    another_boot(marker)
    path = store.path(sha256s[0], form=Form.ZSTD)
    assert path is not None
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-5])
    found = store.recover()
    assert found.dropped_forms == (sha256s[0],)
    assert found.dropped == ()
    assert set(store.list()) == set(sha256s)


def test_names_of_dead_processes_are_cleaned_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib, time\n"
        "from kernel_depot.store.local import LocalStore\n"
        "with LocalStore(pathlib.Path(sys.argv[1])).staging() as staging:\n"
        "    (staging / 'half').write_bytes(b'half')\n"
        "    print(staging, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        staging = Path(child.stdout.readline().strip())
        store = LocalStore(tmp_path)
        with store.staging() as mine:
            assert store.recover().removed == 0
            assert staging.exists()
            child.kill()
            child.wait()
            assert store.recover().removed == 1
            assert mine.exists()
    assert not staging.exists()


def test_names_from_elsewhere_are_left_until_they_are_old(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    foreign = tmp_path / "tmp" / ".".join(["f" * 32, "1", "1", "1", "abc"])
    foreign.mkdir()
    lost = tmp_path / "tmp" / "lost+found"
    lost.mkdir()
    assert store.recover().removed == 0
    old = time.time() - 7200
    os.utime(foreign, (old, old))
    assert store.recover().removed == 1
    assert not foreign.exists()


def test_a_process_name_tells_life_from_death() -> None:
    mine = process_name()
    assert is_dead(mine) is False
    boot, namespace, pid, start, rest = mine.split(".")
    assert is_dead(".".join([boot, namespace, pid, str(int(start) + 1), rest])) is True
    assert is_dead(".".join(["0" * 32, namespace, pid, start, rest])) is None
    assert is_dead("lost+found") is None


def test_strangers_in_the_directory_are_not_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (sha256,) = put(store, b"x")
    (tmp_path / "blobs" / "sha256" / "lost+found").mkdir()
    (tmp_path / "blobs" / "sha256" / sha256[:2] / "notes.txt").write_text("hello")
    assert list(store.list()) == [sha256]


def test_racing_publishers_of_one_blob_all_win(store: Store, tmp_path: Path) -> None:
    content = os.urandom(200_000)

    def publish(number: int) -> None:
        with store.staging() as staging:
            store.publish(stage(staging, content, str(number)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(publish, range(24)))
    sha256 = hashlib.sha256(content).hexdigest()
    assert list(store.list()) == [sha256]
    assert b"".join(store.read(sha256)) == content
