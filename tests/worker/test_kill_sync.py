"""kill -9 of a syncing process at random points: nothing wrong is published, the next run cleans up."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kernel_depot.digest import sha256_file
from kernel_depot.platform import Arch, CudaTag, Platform, Sm
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.sync import SyncRequest, sync

CHILD = """
import sys
from pathlib import Path
from kernel_depot.platform import Arch, CudaTag, Platform, Sm
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.client import Endpoint
from kernel_depot.worker.sync import SyncRequest, sync
import http.client, zstandard
print("ready", flush=True)
sync(
    SyncRequest(), endpoint=Endpoint(sys.argv[1], trust_env=False), cache=Cache(Path(sys.argv[2])),
    platform=Platform(CudaTag(13, 0), Arch.X86_64, Sm(9, 0)),
)
print("done", flush=True)
"""
POINTS = 20


def start(url: str, cache: Path) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-c", CHILD, url, str(cache)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child


def test_no_kill_leaves_wrong_bytes_or_lasting_leftovers(
    upstream: Any, make_bundle: Any, tmp_path: Path
) -> None:
    dice = random.Random()
    files = {f"cubins/{index:03}.bin": dice.randbytes(dice.randrange(1, 60_000)) for index in range(150)}
    files |= {f"flashinfer_jit_cache/jit_cache/m{n}/m{n}.so": dice.randbytes((5 << 20) + n) for n in range(3)}
    digest = upstream.publish(make_bundle(upstream, files))
    begun = time.monotonic()
    whole = start(upstream.url, tmp_path / "whole")
    begun = time.monotonic()
    assert whole.wait() == 0
    duration = time.monotonic() - begun
    cut = 0
    for point in range(POINTS):
        cache = Cache(tmp_path / f"cache-{point}")
        child = start(upstream.url, cache.root)
        time.sleep(dice.uniform(0, duration))
        child.kill()
        child.wait()
        assert child.stdout is not None
        cut += child.stdout.read() != b"done\n"
        child.stdout.close()
        for path in cache.blobs.glob("*/*"):
            assert sha256_file(path) == path.name
        if cache.current.exists():
            assert cache.current_digest() == digest
            for name, data in files.items():
                assert (cache.current / "files" / name).read_bytes() == data
        for view in cache.views.glob("*/files"):
            assert len([path for path in view.rglob("*") if path.is_file()]) == len(files)
        sync(
            SyncRequest(),
            endpoint=upstream.endpoint(),
            platform=Platform(CudaTag(13, 0), Arch.X86_64, Sm(9, 0)),
            cache=cache,
        )
        assert list(cache.tmp.iterdir()) == []
        assert {path.name for path in cache.root.iterdir()} == {
            "blobs", "bundles", "current", "tmp", "unsynced", "views",
        }  # fmt: skip
        for name, data in files.items():
            assert (cache.current / "files" / name).read_bytes() == data
    assert whole.stdout is not None
    whole.stdout.close()
    assert cut > POINTS // 4
