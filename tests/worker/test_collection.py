"""Making room: whole bundles, the least recently used first, never what something uses."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_depot.bundle import ArtifactKind, Bundle, BundleArtifact, BundleWheel, PinSetRef
from kernel_depot.platform import Arch, CudaTag, Platform
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.collection import UNNAMED_AGE, collect, pin, unpin
from kernel_depot.worker.errors import CacheEmpty
from kernel_depot.worker.usage import usage
from kernel_depot.worker.views import _DROP_IN, View, ViewChoice, build_views

SIZE = 100_000
Put = Callable[..., str]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    made = Cache(tmp_path / "cache")
    made.prepare()
    return made


@pytest.fixture
def put(cache: Cache) -> Put:
    """Put a bundle of blobs into the cache, last used so many seconds ago; `shared` blobs are in all."""

    def make(name: str, *, age: float, shared: bytes = b"", current: bool = False) -> str:
        blobs = {f"{name}.so": hashlib.sha256(name.encode()).digest() * (SIZE // 32)}
        if shared:
            blobs["shared.so"] = shared
        artifacts = []
        for path, data in blobs.items():
            sha256 = hashlib.sha256(data).hexdigest()
            cache.fan_out([sha256])
            if not cache.blob_path(sha256).exists():
                cache.blob_path(sha256).write_bytes(data)
            artifacts.append(BundleArtifact(path, ArtifactKind.SUPPORT, sha256, len(data), "e" * 64, None))
        bundle = Bundle(
            pin_sets=(PinSetRef(name, "0" * 64),),
            platform=Platform(CudaTag(13, 0), Arch.parse("x86_64"), None),
            modules=None,
            groups=(),
            wheels=(BundleWheel("p", "1", "p-1-py3-none-any.whl", "e" * 64, 1, "cu130"),),
            artifacts=tuple(artifacts),
            missing=(),
        )
        data = json.dumps(bundle.to_json(), sort_keys=True, separators=(",", ":")).encode()
        digest = hashlib.sha256(data).hexdigest()
        with cache.private() as private:
            cache.write_bundle(digest, data, private=private)
            build_views(cache, digest, bundle, ViewChoice((View.FILES,)), private=private)
            if current:
                cache.switch(digest, private=private)
        moment = time.time() - age
        os.utime(cache.bundle_path(digest), (moment, moment))
        return digest

    return make


def write_bundle(cache: Cache, name: str, blobs: set[int], *, private: Path) -> tuple[str, set[str]]:
    """Put a bundle of blobs of 1,000 bytes, each told by its number, into the cache."""
    hashes = set()
    artifacts = []
    for number in sorted(blobs):
        data = bytes([number]) * 1000
        sha256 = hashlib.sha256(data).hexdigest()
        hashes.add(sha256)
        cache.fan_out([sha256])
        cache.blob_path(sha256).write_bytes(data)
        artifacts.append(BundleArtifact(f"{number}.so", ArtifactKind.SUPPORT, sha256, 1000, "e" * 64, None))
    data = canonical(name, tuple(artifacts))
    digest = hashlib.sha256(data).hexdigest()
    cache.write_bundle(digest, data, private=private)
    cache.view_dir(digest).mkdir(parents=True)
    return digest, hashes


def canonical(name: str, artifacts: tuple[BundleArtifact, ...]) -> bytes:
    """Return the manifest of a bundle."""
    bundle = Bundle(
        pin_sets=(PinSetRef(name, "0" * 64),),
        platform=Platform(CudaTag(13, 0), Arch.parse("x86_64"), None),
        modules=None,
        groups=(),
        wheels=(BundleWheel("p", "1", "p-1-py3-none-any.whl", "e" * 64, 1, "cu130"),),
        artifacts=artifacts,
        missing=(),
    )
    return json.dumps(bundle.to_json(), sort_keys=True, separators=(",", ":")).encode()


def held(cache: Cache) -> set[str]:
    return {path.stem for path in cache.bundles.glob("*.json")}


def test_the_least_recently_used_go_first_and_shared_blobs_stay(cache: Cache, put: Put) -> None:
    shared = os.urandom(1000)
    old, middle = put("old", age=300, shared=shared), put("middle", age=200, shared=shared)
    now = put("now", age=400, shared=shared, current=True)
    assert collect(cache, limit=10 * SIZE).removed == ()
    done = collect(cache, limit=2 * SIZE + 5000, dry_run=True)
    assert done.removed == (old,)
    assert held(cache) == {old, middle, now}
    done = collect(cache, limit=2 * SIZE + 5000)
    assert (done.removed, done.over, done.removed_blobs) == ((old,), 0, 1)
    assert held(cache) == {middle, now}
    assert not cache.view_dir(old).exists()
    assert (cache.view_dir(middle) / "files" / "shared.so").read_bytes() == shared
    assert sum(path.stat().st_size for path in cache.blobs.glob("*/*")) == done.after


def test_what_is_current_pinned_or_wanted_stays_and_the_excess_is_told(cache: Cache, put: Put) -> None:
    one, two = put("one", age=300), put("two", age=200)
    three, now = put("three", age=100), put("now", age=400, current=True)
    pin(cache, one)
    done = collect(cache, limit=0, keep=[two])
    assert done.removed == (three,)
    assert {kept.digest: kept.why for kept in done.kept} == {one: "pinned", two: "wanted", now: "current"}
    assert done.over == done.after > 0
    unpin(cache, one)
    assert collect(cache, limit=0).removed == tuple(sorted([one, two], key=[one, two].index))
    with pytest.raises(CacheEmpty):
        pin(cache, one)


HOLD = """\
import mmap, sys
file = open(sys.argv[1], "rb")
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
file.close()
print("mapped", flush=True)
sys.stdin.read()
"""


def test_a_mapped_file_keeps_its_bundle_under_whichever_name_it_was_mapped(cache: Cache, put: Put) -> None:
    used, free = put("used", age=300), put("free", age=200)
    put("now", age=100, current=True)
    blob = hashlib.sha256(hashlib.sha256(b"used").digest() * (SIZE // 32)).hexdigest()
    for path in (cache.view_dir(used) / "files" / "used.so", cache.blob_path(blob)):
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mapped\n"
        seen = usage(cache)
        assert blob in seen.blobs
        done = collect(cache, limit=0)
        assert used in {kept.digest for kept in done.kept}
        assert cache.blob_path(blob).exists()
        holder.communicate()
    assert free not in held(cache)
    assert collect(cache, limit=0).removed == (used,)
    assert not cache.blob_path(blob).exists()


def test_a_view_in_an_environment_or_an_imported_drop_in_keeps_its_bundle(
    cache: Cache, put: Put, tmp_path: Path
) -> None:
    given, imported = put("given", age=300), put("imported", age=200)
    put("now", age=100, current=True)
    view = cache.view_dir(given) / "files"
    package = cache.view_dir(imported) / "flashinfer" / "flashinfer_jit_cache"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_DROP_IN.format(version="1", providers="[]"))
    link = tmp_path / "link"
    link.symlink_to(package.parent)
    program = "import sys\nimport {}\nprint('runs', flush=True)\nsys.stdin.read()"
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", program.format(name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        for name, path in (("os", view), ("flashinfer_jit_cache", link))
    ]
    for holder in holders:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"runs\n"
    link.unlink()
    assert collect(cache, limit=0).removed == ()
    for holder in holders:
        holder.communicate()
    assert set(collect(cache, limit=0).removed) == {given, imported}


def test_old_blobs_that_no_bundle_names_go_and_new_ones_stay(cache: Cache, put: Put) -> None:
    put("now", age=0, current=True)
    for name, age in (("a" * 64, 2 * UNNAMED_AGE), ("b" * 64, 0.0)):
        cache.fan_out([name])
        cache.blob_path(name).write_bytes(b"left over")
        moment = time.time() - age
        os.utime(cache.blob_path(name), (moment, moment))
    assert collect(cache, limit=None).removed_blobs == 1
    assert not cache.blob_path("a" * 64).exists()
    assert cache.blob_path("b" * 64).exists()


def test_a_collection_waits_for_a_sync_that_relies_on_blobs(cache: Cache, put: Put) -> None:
    put("now", age=0, current=True)
    put("old", age=300)
    command = [sys.executable, "-m", "kernel_depot.cli.main", "cache", "gc", "--limit", "0.11MB"]
    with cache.using():
        collector = subprocess.Popen([*command, "--cache", cache.root, "--json"], stdout=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            collector.wait(1.5)
        assert len(held(cache)) == 2
    out, _ = collector.communicate(timeout=30)
    told: dict[str, Any] = json.loads(out)
    assert (len(told["removed"]), collector.returncode) == (1, 0)


def test_mapped_memory_outlives_what_was_collected(cache: Cache, put: Put) -> None:
    """Even where /proc cannot be read, a file that is mapped is never changed: it is unlinked."""
    old = put("old", age=300)
    put("now", age=0, current=True)
    path = cache.view_dir(old) / "files" / "old.so"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        before = bytes(mapped)
        path.unlink()
        assert bytes(mapped) == before


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    holds=st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=1, max_size=5),
    stays=st.lists(st.sampled_from(["", "current", "pinned", "wanted"]), min_size=5, max_size=5),
    limit=st.integers(0, 9),
)
def test_nothing_that_stays_loses_a_blob_and_room_is_made_as_far_as_it_can_be(
    tmp_path: Path, holds: list[set[int]], stays: list[str], limit: int
) -> None:
    cache = Cache(Path(tempfile.mkdtemp(dir=tmp_path)))
    cache.prepare()
    named: dict[str, set[str]] = {}
    wanted: list[str] = []
    with cache.private() as private:
        for number, blobs in enumerate(holds):
            digest, hashes = write_bundle(cache, f"b{number}", blobs, private=private)
            named[digest] = hashes
            os.utime(cache.bundle_path(digest), (number, number))
            stay = stays[number]
            if stay == "current":
                cache.current.unlink(missing_ok=True)
                cache.switch(digest, private=private)
            elif stay == "pinned":
                pin(cache, digest)
            elif stay == "wanted":
                wanted.append(digest)
    current = cache.current_digest()
    kept = {digest for digest in named if (cache.bundles / f"{digest}.pinned").exists()}
    kept |= {*wanted, *([current] if current else [])}
    done = collect(cache, limit=limit * 1000, keep=wanted)
    left = {path.name for path in cache.blobs.glob("*/*")}
    assert kept <= held(cache)
    assert set(done.removed) == named.keys() - held(cache)
    assert left == {sha256 for digest in held(cache) for sha256 in named[digest]}
    assert done.after == 1000 * len(left)
    assert done.after <= limit * 1000 or held(cache) == kept
    removable = [digest for digest in named if digest not in kept]  # the oldest first
    assert list(done.removed) == removable[: len(done.removed)]
