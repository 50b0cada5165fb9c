from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kernel_depot import liveness
from kernel_depot.worker.cache import FOREIGN_AGE, Cache


def test_a_living_process_keeps_its_private_directory_and_a_dead_one_does_not(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.prepare()
    code = "from kernel_depot.liveness import process_name; print(process_name())"
    dead = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    (cache.tmp / dead.strip()).mkdir()
    with cache.private() as one, cache.private() as two:
        Cache(tmp_path).prepare()
        assert {path.name for path in cache.tmp.iterdir()} == {one.name, two.name}
    assert not list(cache.tmp.iterdir())


def test_a_directory_that_cannot_be_looked_up_is_dropped_when_old(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.prepare()
    for name, age in (("elsewhere-1-2-3-0", 0.0), ("elsewhere-1-2-4-0", FOREIGN_AGE + 60)):
        (cache.tmp / name).mkdir()
        os.utime(cache.tmp / name, (time.time() - age,) * 2)
    cache.prepare()
    assert [path.name for path in cache.tmp.iterdir()] == ["elsewhere-1-2-3-0"]


def test_a_host_without_a_boot_id_can_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("/proc/sys/kernel/random/boot_id")

    monkeypatch.setattr(liveness, "boot_id", none)
    cache = Cache(tmp_path)
    cache.prepare()
    with cache.private() as directory:
        cache.prepare()
        assert directory.is_dir()
    cache.mark_unsynced(["0" * 64])
    assert [note.name.partition("_")[0] for note in cache.unsynced.iterdir()] == ["unknown"]
