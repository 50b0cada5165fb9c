"""`kernel-depot smoke` on a GPU: every module of a synced cache passes, and a faulty one is caught.

`KERNEL_DEPOT_GPU_CACHE` names a node's cache; `KERNEL_DEPOT_SMOKE_REPORT` a file for the report.
`KERNEL_DEPOT_GPU_FAULTY` names a module `norm` that was compiled with another epsilon than it is given.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_depot.bundle import ArtifactKind, Bundle, BundleArtifact, BundleWheel
from kernel_depot.platform import CudaTag, Platform
from kernel_depot.smoke.cases import smoke, this_host
from kernel_depot.smoke.report import Status
from kernel_depot.worker.cache import Cache

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    if this_host().sm is None:
        pytest.skip("no GPU")


@pytest.mark.timeout(1200)
def test_every_module_of_the_bundle_passes() -> None:
    cache = os.environ.get("KERNEL_DEPOT_GPU_CACHE")
    if cache is None:
        pytest.skip("KERNEL_DEPOT_GPU_CACHE names no cache")
    command = [sys.executable, "-m", "kernel_depot.cli.main", "smoke", "--json", "--cache", cache]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1100)
    report = json.loads(done.stdout)
    if place := os.environ.get("KERNEL_DEPOT_SMOKE_REPORT"):
        Path(place).write_text(json.dumps(report, indent=1), encoding="utf-8")
    bad = [one for one in report["outcomes"] if one["status"] not in ("pass", "skipped")]
    assert bad == [], done.stderr[-2000:]
    assert done.returncode == 0
    assert report["gpu"]
    assert report["driver"]
    assert [one for one in report["modules"] if one["outcome"] != "pass"] == []


def test_a_faulty_module_is_caught(tmp_path: Path) -> None:
    place = os.environ.get("KERNEL_DEPOT_GPU_FAULTY")
    if place is None:
        pytest.skip("KERNEL_DEPOT_GPU_FAULTY names no module")
    host = this_host()
    assert host.sm is not None
    data = Path(place).read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    cache = Cache(tmp_path / "cache")
    cache.prepare()
    cache.fan_out([sha256])
    cache.blob_path(sha256).write_bytes(data)
    path = "flashinfer_jit_cache/jit_cache/norm/norm.so"
    norm = BundleArtifact(
        path, ArtifactKind.MODULE, sha256, len(data), "a" * 64, "norm", sms=(f"{host.sm.target}a",)
    )
    wheel = BundleWheel("flashinfer_jit_cache", "0.6.3", "x.whl", "a" * 64, 1, "cu130")
    bundle = Bundle((), Platform(CudaTag(13, 0), host.arch), (wheel,), (norm,))
    manifest = json.dumps(bundle.to_json(), sort_keys=True).encode()
    digest = hashlib.sha256(manifest).hexdigest()
    cache.bundle_path(digest).write_bytes(manifest)
    report = smoke(cache, host=host, digest=digest)
    [result] = report.results()
    assert result.status is Status.FAIL, result
    assert "rmsnorm" in result.why
    assert result.expected != result.found
    assert not report.ok
