from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernel_depot.platform import Arch, CudaTag, Platform, Sm
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.environment import Environment
from kernel_depot.worker.sync import SyncRequest, sync

PLATFORM = Platform(CudaTag(13, 0), Arch.X86_64, Sm(9, 0))


@pytest.fixture
def cache(upstream: Any, make_bundle: Any, tmp_path: Path) -> Cache:
    upstream.publish(make_bundle(upstream, {"flashinfer_jit_cache/jit_cache/norm/norm.so": b"norm"}))
    cache = Cache(tmp_path / "cache")
    sync(SyncRequest(), endpoint=upstream.endpoint(), platform=PLATFORM, cache=cache)
    return cache


def start(cache: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kernel_depot.cli.main", "run", "--cache", str(cache), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_program_has_the_variables_and_the_same_process(cache: Cache) -> None:
    code = (
        "import os, sys, flashinfer_jit_cache;"
        "print(os.getpid(), os.environ['FLASHINFER_DISABLE_JIT'], flashinfer_jit_cache.get_jit_cache_dir(),"
        " *sys.argv[1:])"
    )
    process = start(cache.root, "--", sys.executable, "-c", code, "--json", "--cache", "a b")
    out, err = process.communicate(timeout=60)
    view = cache.view_dir(str(cache.current_digest())).resolve()
    assert out == f"{process.pid} 1 {view}/flashinfer/flashinfer_jit_cache/jit_cache --json --cache a b\n", (
        err
    )
    assert process.returncode == 0


@pytest.mark.parametrize("dashes", [["--"], []])
def test_the_exit_status_is_the_programs(cache: Cache, dashes: list[str]) -> None:
    process = start(cache.root, *dashes, "sh", "-c", "echo out; echo err >&2; exit 42")
    assert process.communicate(timeout=60) == ("out\n", "err\n")
    assert process.returncode == 42


def test_signals_reach_the_program_and_its_death_is_seen(cache: Cache) -> None:
    process = start(
        cache.root,
        "--",
        "sh",
        "-c",
        "trap 'echo caught; exit 9' TERM; echo ready; while :; do sleep 0.05; done",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "caught\n"
    assert process.returncode == 9
    killed = start(cache.root, "--", "sh", "-c", "kill -KILL $$")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL


def test_a_closed_pipe_ends_the_program(cache: Cache) -> None:
    """Python ignores SIGPIPE, and a program it becomes would go on ignoring it."""
    process = start(cache.root, "--", "sh", "-c", "kill -PIPE $$; echo still here")
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == -signal.SIGPIPE


def test_a_program_that_is_not_there_or_not_one(cache: Cache, tmp_path: Path) -> None:
    process = start(cache.root, "--", "no-such-program-here")
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("", 127)
    assert "no-such-program-here" in err
    assert "program-not-run" in err
    text = tmp_path / "text"
    text.write_text("no program")
    process = start(cache.root, "--", str(text))
    process.communicate(timeout=60)
    assert process.returncode == 126


def test_without_a_bundle_nothing_is_run(tmp_path: Path) -> None:
    process = start(tmp_path, "--", "sh", "-c", "echo ran")
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("", 1)
    assert "cache-empty" in err


def test_what_was_set_stays_behind_what_the_depot_says() -> None:
    wanted = Environment({"FLASHINFER_DISABLE_JIT": "1"}, ("/view",), ())
    before = {"PYTHONPATH": "/mine", "FLASHINFER_DISABLE_JIT": "0", "OTHER": "kept"}
    assert wanted.over(before) == {
        "PYTHONPATH": "/view:/mine",
        "FLASHINFER_DISABLE_JIT": "1",
        "OTHER": "kept",
    }
    assert wanted.over({"PYTHONPATH": ""})["PYTHONPATH"] == "/view"
    assert "PYTHONPATH" not in Environment({}, (), ()).over({})
