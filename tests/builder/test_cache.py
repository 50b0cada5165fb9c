"""The builder's directory: whole or absent, whatever happens in between."""

import errno
import os
from pathlib import Path
from threading import Event

import pytest

from kernel_depot.builder.cache import BuildCache, BuiltModule, room
from kernel_depot.builder.errors import BuildDiskFull
from kernel_depot.builder.slots import Slots
from kernel_depot.digest import sha256_file
from kernel_depot.liveness import process_name

KEY = "a" * 64


def module(library: Path) -> BuiltModule:
    return BuiltModule(
        uri="page",
        key=KEY,
        sha256=sha256_file(library),
        size=library.stat().st_size,
        sms=("sm90a",),
        glibc="2.14",
        glibcxx=None,
        functions=("__tvm_ffi_f",),
        recipe="b" * 64,
        toolchain={"nvcc": "13.0.88"},
        seconds=1.5,
        peak=7,
        isolated=True,
    )


def test_a_module_is_kept_and_read_back(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path / "cache")
    library = tmp_path / "x.so"
    library.write_bytes(b"code")
    assert cache.module(KEY) is None
    kept = cache.keep(module(library), library)
    assert cache.module(KEY) == (module(library), kept)
    library.write_bytes(b"of a second builder")
    assert cache.keep(module(library), library).read_bytes() == b"code"


@pytest.mark.parametrize("damage", ["module.so", "module.json"])
def test_a_damaged_module_is_dropped(tmp_path: Path, damage: str) -> None:
    cache = BuildCache(tmp_path / "cache")
    library = tmp_path / "x.so"
    library.write_bytes(b"code")
    path = cache.keep(module(library), library).with_name(damage)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.module(KEY) is None
    assert not cache.directory("modules", KEY).exists()


def test_what_is_not_filled_whole_does_not_appear(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path / "cache")

    def fill(private: Path) -> None:
        (private / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(private / "half"))

    with pytest.raises(BuildDiskFull, match=r"no room for .*half") as caught:
        cache.make("sources", "name", fill)
    assert "free space" in str(caught.value.remedy)
    assert list(cache.work.iterdir()) == []
    assert not cache.directory("sources", "name").exists()


def test_other_failures_stay_what_they_are() -> None:
    with pytest.raises(PermissionError), room("x"):
        raise PermissionError(errno.EACCES, "no")


def test_work_that_was_left_is_adopted_and_the_rest_swept(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path / "cache")
    mine = cache.adopt(KEY)
    (mine / "build.ninja").write_text("")
    other = cache.adopt(KEY)
    assert other != mine  # a live builder's work is its own
    cache.release(mine)
    dead = process_name().split(".")
    dead[3] = "1"  # a process of this PID that started at another time
    (cache.work / f"generator.{'.'.join(dead)}").mkdir()
    (cache.work / f"slots.{'.'.join(dead)}").touch()
    cache.sweep()
    left = {path.name.partition(".")[2][:5] for path in cache.work.iterdir() if path != other}
    assert left == {"left-"}
    adopted = cache.adopt(KEY)
    assert (adopted / "build.ninja").exists()


def test_slots_are_given_and_taken(tmp_path: Path) -> None:
    stop = Event()
    with Slots(tmp_path / "slots", 2) as slots:
        assert slots.take(stop)
        assert slots.take(stop)
        stop.set()
        assert not slots.take(stop)
        stop.clear()
        slots.give()
        assert slots.take(stop)
        slots.give()
        # A killed ninja took one along; with the last module it comes back.
        pipe = os.open(tmp_path / "slots", os.O_RDWR | os.O_NONBLOCK)
        assert os.read(pipe, 1) == b"+"
        os.close(pipe)
        slots.give()
        assert slots.take(stop)
        assert slots.take(stop)
    assert not (tmp_path / "slots").exists()
