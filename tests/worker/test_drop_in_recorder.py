from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernel_depot.platform import Arch, CudaTag, Platform, Sm
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.coverage import Asked, read_record
from kernel_depot.worker.environment import environment
from kernel_depot.worker.errors import RecorderMissing
from kernel_depot.worker.sync import SyncRequest, sync

PLATFORM = Platform(CudaTag(13, 0), Arch.X86_64, Sm(9, 0))

# As FlashInfer does: the core imports the environment, which imports the drop-in, before it has a class.
CORE = """
import os
from . import env
class JitSpec:
    def __init__(self, name):
        self.name = name
    @property
    def is_aot(self):
        return os.path.exists(os.path.join(env.DIRECTORY, self.name, self.name + ".so"))
    def build_and_load(self):
        if not self.is_aot:
            raise RuntimeError("compilation is disabled: " + self.name)
        return self.name + " loaded"
"""
FILES = {
    "__init__.py": "from .version import __version__\nfrom . import jit\n",
    "version.py": "__version__ = 'VERSION'\n",
    "jit/__init__.py": "from . import core\nfrom . import attention\n",
    "jit/env.py": "import flashinfer_jit_cache\nDIRECTORY = flashinfer_jit_cache.get_jit_cache_dir()\n",
    "jit/core.py": CORE,
    "jit/attention.py": "",
}
WORKLOAD = """
from flashinfer.jit.core import JitSpec
for name in ("norm", "rope", "norm", "single_decode"):
    try:
        print(JitSpec(name).build_and_load())
    except RuntimeError as error:
        print(error)
"""


def flashinfer(directory: Path, version: str) -> Path:
    for name, text in FILES.items():
        path = directory / "flashinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("VERSION", version))
    return directory


def work(cache: Cache, library: Path, record: Path | None) -> subprocess.CompletedProcess[str]:
    variables = environment(cache, record=record).over({**os.environ, "PYTHONPATH": str(library)})
    return subprocess.run(
        [sys.executable, "-B", "-c", WORKLOAD], env=variables, capture_output=True, text=True, check=False
    )


@pytest.fixture
def cache(upstream: Any, make_bundle: Any, tmp_path: Path) -> Cache:
    modules = {"flashinfer_jit_cache/jit_cache/norm/norm.so": b"norm"}
    upstream.publish(make_bundle(upstream, modules, wheels=[("flashinfer_jit_cache", "0.6.10+cu130")]))
    cache = Cache(tmp_path / "cache")
    sync(SyncRequest(), endpoint=upstream.endpoint(), platform=PLATFORM, cache=cache)
    return cache


def test_what_is_asked_for_is_written_down_and_nothing_else_changes(cache: Cache, tmp_path: Path) -> None:
    library = flashinfer(tmp_path / "library", "0.6.10")
    record = tmp_path / "record"
    silent, recorded = work(cache, library, None), work(cache, library, record)
    assert silent.stdout == recorded.stdout, recorded.stderr
    assert recorded.stdout.splitlines()[:2] == ["norm loaded", "compilation is disabled: rope"]
    assert read_record(record) == [
        Asked("norm", "0.6.10", found=True),
        Asked("rope", "0.6.10", found=False),
        Asked("norm", "0.6.10", found=True),
        Asked("single_decode", "0.6.10", found=False),
    ]
    work(cache, library, record)
    assert len(record.read_text().splitlines()) == 8  # a second program appends
    assert {frozenset(json.loads(line)) for line in record.read_text().splitlines()} == {
        frozenset({"module", "found", "flashinfer"})
    }


@pytest.mark.parametrize("version", ["0.6.1", "0.6.100", "0.7.4", "0.6.10rc1", "0.6.10.post1"])
def test_another_version_is_refused(cache: Cache, tmp_path: Path, version: str) -> None:
    """FlashInfer itself compares beginnings, and 0.6.1 begins 0.6.10."""
    done = work(cache, flashinfer(tmp_path, version), None)
    assert done.returncode == 1
    assert f"synced modules of FlashInfer 0.6.10+cu130, but flashinfer-python is {version}:" in done.stderr


@pytest.mark.parametrize("version", ["0.6.10", "0.6.10+cu130", "0.6.10+local"])
def test_a_local_part_makes_no_other_version(cache: Cache, tmp_path: Path, version: str) -> None:
    assert "norm loaded" in work(cache, flashinfer(tmp_path, version), None).stdout


def test_a_view_that_cannot_record_says_so(cache: Cache, tmp_path: Path) -> None:
    view = cache.view_dir(str(cache.current_digest()))
    (view / "flashinfer/flashinfer_jit_cache/recorder.py").unlink()
    with pytest.raises(RecorderMissing, match="sync again"):
        environment(cache, record=tmp_path / "record")
