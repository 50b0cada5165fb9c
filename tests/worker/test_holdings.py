from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kernel_depot.cli.cache import app
from kernel_depot.platform import Arch, CudaTag, Platform, Sm
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.holdings import holdings, verify
from kernel_depot.worker.sync import SyncRequest, sync

NORM = "flashinfer_jit_cache/jit_cache/norm/norm.so"
PAGE = "flashinfer_jit_cache/jit_cache/page/page.so"


@pytest.fixture
def synced(upstream: Any, make_bundle: Any, tmp_path: Path) -> tuple[Cache, list[str]]:
    """Two bundles that share one blob of 1000 bytes; the second, with one more of 300, is current."""
    cache = Cache(tmp_path / "cache")
    digests = []
    for files in ({NORM: b"n" * 1000, PAGE: b"p" * 200}, {NORM: b"n" * 1000, PAGE: b"q" * 300}):
        digests.append(upstream.publish(make_bundle(upstream, files)))
        bring(upstream, cache)
    return cache, digests


def bring(upstream: Any, cache: Cache) -> None:
    platform = Platform(CudaTag(13, 0), Arch.X86_64, Sm(9, 0))
    sync(SyncRequest(), endpoint=upstream.endpoint(), platform=platform, cache=cache)


def test_bundles_are_listed_with_what_is_their_own(synced: tuple[Cache, list[str]]) -> None:
    cache, (first, second) = synced
    held = holdings(cache)
    listed = {bundle.digest: bundle for bundle in held.bundles}
    assert set(listed) == {first, second}
    assert [listed[digest].current for digest in (first, second)] == [False, True]
    assert [listed[digest].bytes for digest in (first, second)] == [1200, 1300]
    assert [listed[digest].own_bytes for digest in (first, second)] == [200, 300]
    assert all(bundle.missing == 0 and "files" in bundle.views for bundle in held.bundles)
    assert (held.blobs, held.bytes, held.unnamed_bytes, held.unreadable) == (3, 1500, 0, ())


def test_missing_blobs_torn_manifests_and_unnamed_blobs_are_told(synced: tuple[Cache, list[str]]) -> None:
    cache, (first, second) = synced
    own = next(path for path in cache.blobs.glob("*/*") if path.stat().st_size == 200)
    own.unlink()
    manifest = cache.bundle_path(second)
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes()[:-1])
    held = holdings(cache)
    assert [(bundle.digest, bundle.missing) for bundle in held.bundles] == [(first, 1)]
    assert held.unreadable == (second,)
    assert held.unnamed_bytes == 300


def test_an_empty_cache_is_listed_and_left_uncreated(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "none")
    assert holdings(cache).bundles == ()
    assert verify(cache).blobs == 0
    assert not cache.root.exists()


def test_wrong_bytes_are_found_and_repaired_as_the_remedy_says(
    synced: tuple[Cache, list[str]], upstream: Any
) -> None:
    cache, (_, second) = synced
    assert verify(cache).wrong == ()
    path = next(path for path in cache.blobs.glob("*/*") if path.stat().st_size == 300)
    path.chmod(0o644)
    path.write_bytes(b"x" * 300)
    called = CliRunner().invoke(app, ["verify", "--cache", str(cache.root), "--json"])
    assert called.exit_code == 1
    wrong = json.loads(called.stdout)["wrong"]
    assert [entry["path"] for entry in wrong] == [str(path)]
    assert path.read_bytes() == b"x" * 300
    path.unlink()
    bring(upstream, cache)
    assert verify(cache).wrong == ()
    assert (cache.view_dir(second) / "files" / PAGE).read_bytes() == b"q" * 300


def test_the_command_lists_for_people_and_programs(synced: tuple[Cache, list[str]]) -> None:
    cache, (_, second) = synced
    text = CliRunner().invoke(app, ["ls", "--cache", str(cache.root)])
    assert text.exit_code == 0
    assert f"* {second}" in text.stdout
    data = CliRunner().invoke(app, ["ls", "--cache", str(cache.root), "--json"])
    assert [bundle["current"] for bundle in json.loads(data.stdout)["bundles"]].count(True) == 1
