from __future__ import annotations

import errno
import json
import random
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from kernel_depot.digest import sha256_file
from kernel_depot.platform import Arch, CudaTag, Platform, Sm
from kernel_depot.worker.blobs import Meter
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.errors import (
    BlobMismatch,
    BundleIncomplete,
    CacheDamaged,
    CacheEmpty,
    CacheFull,
    ServerRefused,
    ServerUnreachable,
)
from kernel_depot.worker.sync import SyncRequest, sync, sync_offline

PLATFORM = Platform(CudaTag(13, 0), Arch.X86_64, Sm(9, 0))
BIG = 5 << 20


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def sample(*, big: bool = False) -> dict[str, bytes]:
    files = {
        f"flashinfer_jit_cache/jit_cache/{name}/{name}.so": noise(30_000 + index, index) + bytes(40_000)
        for index, name in enumerate(("norm", "page", "gdn_prefill_sm90", "single_decode"))
    }
    files["tvm_ffi/lib/libtvm_ffi.so"] = noise(1 << 20, 50)
    files["flashinfer_jit_cache-0.6.3+cu130.dist-info/METADATA"] = b"Name: flashinfer-jit-cache\n"
    files["empty/nothing"] = b""
    if big:
        files["flashinfer_jit_cache/jit_cache/huge/huge.so"] = noise(BIG, 77) + bytes(1 << 20)
    return files


def tree(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }


def published(cache: Cache) -> set[str]:
    """Every blob in the cache; each must be right, read-only and whole."""
    names = set()
    for path in cache.blobs.glob("*/*"):
        assert sha256_file(path) == path.name
        assert stat.S_IMODE(path.stat().st_mode) == 0o444
        names.add(path.name)
    return names


def run(upstream: Any, cache: Cache, **options: Any) -> Any:
    return sync(SyncRequest(**options), endpoint=upstream.endpoint(), platform=PLATFORM, cache=cache)


@pytest.mark.parametrize("zstd", [True, False])
def test_a_bundle_arrives_whole(upstream: Any, make_bundle: Any, tmp_path: Path, zstd: bool) -> None:
    upstream.zstd = zstd
    files = sample(big=True)
    bundle = make_bundle(upstream, files)
    digest = upstream.publish(bundle)
    cache = Cache(tmp_path / "cache")
    report = run(upstream, cache)
    assert report.changed
    assert report.digest == digest
    assert report.fetched_blobs == len({artifact.sha256 for artifact in bundle.artifacts})
    assert report.fetched_bytes == bundle.total_size
    assert report.wire_bytes == pytest.approx(upstream.body_bytes, abs=20_000)
    assert tree(cache.current / "files") == files
    assert published(cache) == {artifact.sha256 for artifact in bundle.artifacts}
    assert cache.current.readlink() == Path("views", digest)
    assert list(cache.tmp.iterdir()) == []
    assert report.trace == ("chosen for the test",)


def test_zstd_moves_fewer_bytes(upstream: Any, make_bundle: Any, tmp_path: Path) -> None:
    upstream.publish(make_bundle(upstream, {"a/x": bytes(6 << 20), "a/y": b"y" * 100_000, "a/z": b"z" * 9}))
    report = run(upstream, Cache(tmp_path))
    assert report.fetched_bytes == (6 << 20) + 100_009
    assert report.wire_bytes < 20_000


def test_identity_can_be_demanded(upstream: Any, make_bundle: Any, tmp_path: Path) -> None:
    upstream.publish(make_bundle(upstream, {"a/x": bytes(6 << 20), "a/y": bytes(100_000), "a/z": b"z"}))
    report = run(upstream, Cache(tmp_path), zstd=False)
    assert report.wire_bytes >= report.fetched_bytes


def test_the_query_names_the_platform_and_the_selection(
    upstream: Any, make_bundle: Any, tmp_path: Path
) -> None:
    upstream.publish(make_bundle(upstream, sample()))
    run(upstream, Cache(tmp_path), modules=("norm", "page"), pins=("one", "two"))
    assert upstream.queries[0] == {
        "cuda": ["cu130"],
        "arch": ["x86_64"],
        "sm": ["sm90"],
        "modules": ["norm,page"],
        "pins": ["one,two"],
    }


def test_the_token_is_sent(upstream: Any, make_bundle: Any, tmp_path: Path) -> None:
    upstream.token = "secret"
    upstream.publish(make_bundle(upstream, sample()))
    cache = Cache(tmp_path)
    with pytest.raises(ServerRefused) as refusal:
        run(upstream, cache)
    assert refusal.value.code == 401
    sync(SyncRequest(), endpoint=upstream.endpoint(token="secret"), platform=PLATFORM, cache=cache)
    assert (cache.current / "files").is_dir()


def test_a_second_sync_asks_once_and_changes_nothing(upstream: Any, make_bundle: Any, tmp_path: Path) -> None:
    upstream.publish(make_bundle(upstream, sample()))
    cache = Cache(tmp_path)
    run(upstream, cache)
    upstream.requests.clear()
    report = run(upstream, cache)
    assert upstream.paths() == ["GET /v1/resolve"]
    assert not report.changed
    assert report.requests == 1
    assert report.fetched_blobs == 0


def test_a_new_bundle_fetches_only_what_is_new(upstream: Any, make_bundle: Any, tmp_path: Path) -> None:
    files = sample()
    first = upstream.publish(make_bundle(upstream, files))
    cache = Cache(tmp_path)
    run(upstream, cache)
    old_view = cache.current.resolve()
    files["flashinfer_jit_cache/jit_cache/norm/norm.so"] = b"another build"
    upstream.publish(make_bundle(upstream, files))
    report = run(upstream, cache)
    assert report.fetched_blobs == 1
    assert tree(cache.current / "files") == files
    assert old_view.is_dir()
    assert old_view.name == first
    upstream.current = first
    upstream.requests.clear()
    assert run(upstream, cache).changed
    assert upstream.paths() == ["GET /v1/resolve"]
    assert cache.current.resolve() == old_view


@pytest.mark.parametrize("at", [0, 1, 100_000, 3 << 20])
def test_a_big_blob_is_resumed_after_a_drop(
    upstream: Any, make_bundle: Any, fault: Any, tmp_path: Path, at: int
) -> None:
    upstream.zstd = False
    data = noise(BIG, 5)
    upstream.publish(make_bundle(upstream, {"a/big.bin": data}))
    upstream.faults.append(fault("/v1/blobs/sha256/", "drop", at=at))
    cache = Cache(tmp_path)
    report = run(upstream, cache)
    assert tree(cache.current / "files") == {"a/big.bin": data}
    ranges = [headers.get("Range") for method, path, headers in upstream.requests if "/sha256/" in path]
    assert ranges == [None, f"bytes={at}-"] if at else [None, None]
    assert report.wire_bytes == pytest.approx(BIG, abs=4096)


def test_a_zstd_body_that_breaks_off_goes_on_as_a_range(
    upstream: Any, make_bundle: Any, fault: Any, tmp_path: Path
) -> None:
    data = noise(BIG, 6)
    upstream.publish(make_bundle(upstream, {"a/big.bin": data}))
    upstream.faults.append(fault("/v1/blobs/sha256/", "drop", at=2 << 20))
    cache = Cache(tmp_path)
    run(upstream, cache)
    assert tree(cache.current / "files") == {"a/big.bin": data}
    ranges = [headers.get("Range") for _, path, headers in upstream.requests if "/sha256/" in path]
    assert ranges[0] is None
    assert ranges[1] is not None


def test_a_server_without_ranges_starts_over(
    upstream: Any, make_bundle: Any, fault: Any, tmp_path: Path
) -> None:
    upstream.zstd = False
    data = noise(BIG, 7)
    upstream.publish(make_bundle(upstream, {"a/big.bin": data}))
    upstream.faults += [fault("/v1/blobs/sha256/", "drop", at=1 << 20), fault("/v1/blobs/sha256/", "restart")]
    cache = Cache(tmp_path)
    meter = Meter()
    sync(SyncRequest(), endpoint=upstream.endpoint(), platform=PLATFORM, cache=cache, meter=meter)
    assert tree(cache.current / "files") == {"a/big.bin": data}
    assert meter.bytes == BIG


def test_zstd_that_does_not_decode_to_its_digest_is_fetched_as_identity(
    upstream: Any, make_bundle: Any, fault: Any, tmp_path: Path
) -> None:
    data = bytes(BIG) + noise(100_000, 8)
    bundle = make_bundle(upstream, {"a/big.bin": data})
    upstream.publish(bundle)
    upstream.faults.append(fault("/v1/blobs/sha256/", "badzstd"))
    cache = Cache(tmp_path)
    report = run(upstream, cache)
    assert tree(cache.current / "files") == {"a/big.bin": data}
    assert report.refetched == (bundle.artifacts[0].sha256,)
    encodings = [headers["Accept-Encoding"] for _, path, headers in upstream.requests if "/sha256/" in path]
    assert encodings == ["zstd", "identity"]


def test_one_wrong_identity_body_is_healed(
    upstream: Any, make_bundle: Any, fault: Any, tmp_path: Path
) -> None:
    upstream.zstd = False
    data = noise(BIG, 9)
    upstream.publish(make_bundle(upstream, {"a/big.bin": data}))
    upstream.faults.append(fault("/v1/blobs/sha256/", "wrong"))
    cache = Cache(tmp_path)
    assert len(run(upstream, cache).refetched) == 1
    assert tree(cache.current / "files") == {"a/big.bin": data}


@pytest.mark.parametrize("kind", ["wrong", "short"])
@pytest.mark.parametrize("size", [BIG, 40_000])
def test_wrong_bytes_twice_are_an_error_naming_both_digests(
    upstream: Any, make_bundle: Any, fault: Any, tmp_path: Path, kind: str, size: int
) -> None:
    upstream.zstd = False
    data = noise(size, 10)
    bundle = make_bundle(upstream, {"a/x.bin": data})
    upstream.publish(bundle)
    upstream.faults.append(fault("/v1/blobs/sha256/", kind, at=1000, times=9))
    cache = Cache(tmp_path)
    with pytest.raises(BlobMismatch) as mismatch:
        run(upstream, cache)
    assert bundle.artifacts[0].sha256 in str(mismatch.value.expected)
    assert len(str(mismatch.value.found).split()[0]) == 64
    assert published(cache) == set()
    assert list(cache.tmp.iterdir()) == []
    assert not cache.current.exists()
    assert [path for path in upstream.paths() if "/sha256/" in path].__len__() == 2


def many(count: int) -> dict[str, bytes]:
    return {f"cubins/{index:04}.bin": noise(2000 + 37 * index, index) for index in range(count)}


@pytest.mark.parametrize("zstd", [True, False])
@pytest.mark.parametrize("at", [0, 300, 512, 40_000, 150_001])
def test_a_broken_stream_goes_on_where_it_stopped(
    upstream: Any, make_bundle: Any, fault: Any, tmp_path: Path, at: int, zstd: bool
) -> None:
    upstream.zstd = zstd
    files = many(60)
    upstream.publish(make_bundle(upstream, files))
    upstream.faults.append(fault("/v1/blobs/stream", "drop", at=at))
    cache = Cache(tmp_path)
    report = run(upstream, cache, jobs=1)
    assert tree(cache.current / "files") == files
    assert report.fetched_bytes == sum(map(len, files.values()))
    assert upstream.paths().count("POST /v1/blobs/stream") == 2


def test_a_wrong_member_of_a_stream_is_fetched_alone(
    upstream: Any, make_bundle: Any, fault: Any, tmp_path: Path
) -> None:
    files = many(20)
    upstream.publish(make_bundle(upstream, files))
    upstream.faults.append(fault("/v1/blobs/stream", "wrong", at=7))
    cache = Cache(tmp_path)
    report = run(upstream, cache)
    assert len(report.refetched) == 1
    assert tree(cache.current / "files") == files
    assert len([path for path in upstream.paths() if "/sha256/" in path]) == 1


def test_a_stream_that_is_no_zstd_is_asked_for_as_identity(
    upstream: Any, make_bundle: Any, fault: Any, tmp_path: Path
) -> None:
    files = {name: str(index).encode() * 5000 for index, name in enumerate(many(20))}
    upstream.publish(make_bundle(upstream, files))
    upstream.faults.append(fault("/v1/blobs/stream", "badzstd"))
    cache = Cache(tmp_path)
    run(upstream, cache)
    assert tree(cache.current / "files") == files
    encodings = [headers["Accept-Encoding"] for _, path, headers in upstream.requests if "stream" in path]
    assert encodings[-1] == "identity"


def test_a_blob_the_server_lost_is_named(upstream: Any, make_bundle: Any, tmp_path: Path) -> None:
    files = many(20)
    bundle = make_bundle(upstream, files)
    upstream.publish(bundle)
    lost = bundle.artifacts[11].sha256
    del upstream.blobs[lost]
    cache = Cache(tmp_path)
    with pytest.raises(ServerRefused) as refusal:
        run(upstream, cache)
    assert refusal.value.type == "urn:test:no-blob"
    assert lost in str(refusal.value.where)
    assert lost not in published(cache)
    assert not cache.current.exists()


@pytest.mark.parametrize("path", ["/v1/resolve", "/v1/bundles/", "/v1/blobs/stream", "/v1/blobs/sha256/"])
@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again(
    upstream: Any, make_bundle: Any, fault: Any, tmp_path: Path, path: str, status: int
) -> None:
    files = sample(big=True)
    upstream.publish(make_bundle(upstream, files))
    upstream.faults.append(fault(path, "status", at=status, times=2, headers={"Retry-After": "0"}))
    cache = Cache(tmp_path)
    run(upstream, cache)
    assert tree(cache.current / "files") == files


def test_a_server_that_stays_busy_is_an_error_with_its_own_type(
    upstream: Any, make_bundle: Any, fault: Any, tmp_path: Path
) -> None:
    upstream.publish(make_bundle(upstream, sample()))
    upstream.faults.append(fault("/v1/blobs/", "status", at=503, times=99))
    with pytest.raises(ServerRefused) as refusal:
        run(upstream, Cache(tmp_path))
    assert refusal.value.problem()["type"] == "urn:test:asked"
    assert refusal.value.problem()["status"] == 503


def test_a_hanging_server_is_left(upstream: Any, make_bundle: Any, fault: Any, tmp_path: Path) -> None:
    from dataclasses import replace

    upstream.publish(make_bundle(upstream, sample()))
    upstream.faults.append(fault("/v1/blobs/stream", "hang", at=2))
    endpoint = upstream.endpoint()
    endpoint = replace(endpoint, patience=replace(endpoint.patience, read=0.3))
    cache = Cache(tmp_path)
    sync(SyncRequest(), endpoint=endpoint, platform=PLATFORM, cache=cache)
    assert tree(cache.current / "files") == sample()


def test_no_server_is_an_error_that_says_how_to_go_on(upstream: Any, tmp_path: Path) -> None:
    endpoint = upstream.endpoint()
    upstream.server.socket.close()
    upstream.server.socket = __import__("socket").socket()
    with pytest.raises(ServerUnreachable, match="--offline"):
        sync(SyncRequest(), endpoint=endpoint, platform=PLATFORM, cache=Cache(tmp_path))


def test_an_incomplete_bundle_is_refused_unless_allowed(
    upstream: Any, make_bundle: Any, tmp_path: Path
) -> None:
    from kernel_depot.bundle import MissingWheel

    missing = MissingWheel(
        "flashinfer_cubin", "flashinfer_cubin-0.6.3-py3-none-any.whl", "1" * 64, "unreachable"
    )
    upstream.publish(make_bundle(upstream, sample(), missing=[missing]))
    cache = Cache(tmp_path)
    with pytest.raises(BundleIncomplete, match=r"flashinfer_cubin-0\.6\.3") as refusal:
        run(upstream, cache)
    assert refusal.value.type.endswith(":bundle-incomplete")
    assert not cache.current.exists()
    report = run(upstream, cache, allow_incomplete=True)
    assert report.missing == (missing,)
    with pytest.raises(BundleIncomplete):
        run(upstream, cache)


def test_offline_needs_a_synced_cache(upstream: Any, make_bundle: Any, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    with pytest.raises(CacheEmpty, match="--server"):
        sync_offline(SyncRequest(), platform=None, cache=cache)
    digest = upstream.publish(make_bundle(upstream, sample()))
    run(upstream, cache)
    upstream.requests.clear()
    report = sync_offline(SyncRequest(), platform=PLATFORM, cache=cache)
    assert (report.digest, report.changed, report.offline) == (digest, False, True)
    assert upstream.requests == []


def test_offline_names_what_is_gone_or_torn(upstream: Any, make_bundle: Any, tmp_path: Path) -> None:
    bundle = make_bundle(upstream, sample())
    upstream.publish(bundle)
    cache = Cache(tmp_path)
    run(upstream, cache)
    torn = cache.blob_path(bundle.artifacts[0].sha256)
    torn.unlink()
    torn.write_bytes(b"torn")
    with pytest.raises(CacheDamaged, match=bundle.artifacts[0].path):
        sync_offline(SyncRequest(), platform=None, cache=cache)
    with pytest.raises(CacheDamaged, match="another platform"):
        sync_offline(SyncRequest(), platform=Platform(CudaTag(12, 9), Arch.X86_64), cache=cache)
    with pytest.raises(CacheDamaged, match="nonesuch"):
        sync_offline(SyncRequest(modules=("norm", "nonesuch")), platform=None, cache=cache)


def test_a_torn_blob_is_fetched_again_and_the_view_healed(
    upstream: Any, make_bundle: Any, tmp_path: Path
) -> None:
    files = sample()
    bundle = make_bundle(upstream, files)
    upstream.publish(bundle)
    cache = Cache(tmp_path)
    run(upstream, cache)
    torn = cache.blob_path(bundle.artifacts[0].sha256)
    torn.chmod(0o644)
    torn.write_bytes(b"torn")  # the same inode as in the views
    report = run(upstream, cache)
    assert (report.changed, report.fetched_blobs) == (True, 1)
    assert tree(cache.current / "files") == files
    rs = next((cache.current / "flashinfer-rs").glob("*/norm.so"))
    assert rs.read_bytes() == files["flashinfer_jit_cache/jit_cache/norm/norm.so"]


def test_a_machine_that_died_is_checked_before_its_blobs_are_used(
    upstream: Any, make_bundle: Any, tmp_path: Path
) -> None:
    files = sample()
    bundle = make_bundle(upstream, files)
    upstream.publish(bundle)
    cache = Cache(tmp_path)
    run(upstream, cache)
    (note,) = cache.unsynced.iterdir()
    torn = bundle.artifacts[1].sha256
    path = cache.blob_path(torn)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(b"\0\0\0")  # the size stays right
    assert not run(upstream, cache).changed
    note.rename(note.with_name("another-boot_" + note.name.partition("_")[2]))
    report = run(upstream, cache)
    assert report.dropped == (torn,)
    assert tree(cache.current / "files") == files
    assert all(not entry.name.startswith("another") for entry in cache.unsynced.iterdir())


def test_a_torn_manifest_is_fetched_again(upstream: Any, make_bundle: Any, tmp_path: Path) -> None:
    digest = upstream.publish(make_bundle(upstream, sample()))
    cache = Cache(tmp_path)
    run(upstream, cache)
    path = cache.bundle_path(digest)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:100])
    run(upstream, cache)
    assert cache.bundle(digest) is not None


def test_several_syncs_share_one_cache(upstream: Any, make_bundle: Any, tmp_path: Path) -> None:
    files = {**many(80), **sample(big=True)}
    digest = upstream.publish(make_bundle(upstream, files))
    cache = Cache(tmp_path)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            run(upstream, Cache(tmp_path))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert tree(cache.current / "files") == files
    assert cache.current_digest() == digest
    published(cache)
    assert list(cache.tmp.iterdir()) == []


def test_a_bundle_larger_than_the_disk_is_refused_before_anything_is_fetched(
    upstream: Any, make_bundle: Any, tmp_path: Path
) -> None:
    from dataclasses import replace

    bundle = make_bundle(upstream, sample())
    huge = replace(bundle.artifacts[0], size=1 << 60, path="a/huge", sha256="f" * 64)
    upstream.publish(replace(bundle, artifacts=(*bundle.artifacts, huge)))
    cache = Cache(tmp_path)
    with pytest.raises(CacheFull, match="--cache"):
        run(upstream, cache)
    assert published(cache) == set()


def test_a_disk_that_fills_up_publishes_nothing_partial(
    upstream: Any, make_bundle: Any, tmp_path: Path
) -> None:
    """The cache lies on a real filesystem of 3 MiB, whose free space a file eats after the check."""
    import ctypes
    import subprocess

    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mounting a small filesystem needs root")
    try:
        files = {f"a/{index}.bin": noise(200_000, index) for index in range(12)}
        upstream.publish(make_bundle(upstream, files))
        cache = Cache(mount / "cache")
        cache.prepare()

        class Eater(Meter):
            def add(self, **counts: int) -> None:
                super().add(**counts)
                if self.blobs == 2 and not (mount / "eaten").exists():
                    with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSPC):
                        (mount / "eaten").write_bytes(bytes(3 << 20))

        with pytest.raises(CacheFull):
            sync(
                SyncRequest(jobs=1),
                endpoint=upstream.endpoint(),
                platform=PLATFORM,
                cache=cache,
                meter=Eater(),
            )
        assert published(cache)
        assert list(cache.tmp.iterdir()) == []
        (mount / "eaten").unlink()
        run(upstream, cache)
        assert tree(cache.current / "files") == files
    finally:
        ctypes.CDLL(None).umount2(str(mount).encode(), 2)


def test_the_report_is_json(upstream: Any, make_bundle: Any, tmp_path: Path) -> None:
    upstream.publish(make_bundle(upstream, sample()))
    report = json.loads(json.dumps(run(upstream, Cache(tmp_path)).to_json()))
    assert report["platform"] == {"cuda": "cu130", "arch": "x86_64", "sm": "sm90"}
    assert set(report["views"]) == {"files", "flashinfer", "flashinfer-rs"}
