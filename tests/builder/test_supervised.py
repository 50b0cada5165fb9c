"""Commands under limits: what ends them, and that nothing of them is left."""

import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Timer

import psutil
import pytest

from kernel_depot.builder import supervised
from kernel_depot.builder.supervised import Outcome, run

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


def sh(
    script: str, tmp_path: Path, *, memory: int = 1 << 30, seconds: float = 60.0, **more: Event
) -> Outcome:
    return run(
        ["sh", "-c", script],
        cwd=tmp_path,
        environment=ENVIRONMENT,
        log=tmp_path / "log",
        memory=memory,
        seconds=seconds,
        **more,
    )


def test_exit_and_output(tmp_path: Path) -> None:
    outcome = sh("pwd; env; echo oops >&2; exit 7", tmp_path)
    assert (outcome.exit, outcome.reason) == (7, None)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == str(tmp_path)
    assert lines[-1] == "oops"
    assert not {line.partition("=")[0] for line in lines[1:-1]} - {"PATH", "PWD", "OLDPWD", "SHLVL", "_"}


def test_a_signal(tmp_path: Path) -> None:
    assert sh("kill -9 $$", tmp_path).exit == -9


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    outcome = run(
        ["/absent/program"],
        cwd=tmp_path,
        environment={},
        log=tmp_path / "log",
        memory=1 << 30,
        seconds=1.0,
    )
    assert outcome.exit != 0
    assert "/absent/program" in "\n".join(supervised.tail(tmp_path / "log"))


def test_what_is_left_in_the_background_is_ended(tmp_path: Path) -> None:
    sh("setsid sleep 600 & echo $! > pid", tmp_path)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_time(tmp_path: Path) -> None:
    outcome = sh("sleep 600 & echo $! > pid; wait", tmp_path, seconds=0.5)
    assert outcome.reason == "time"
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_memory_of_all_processes_together(tmp_path: Path) -> None:
    eat = f"{sys.executable} -S -c 'import time; b = bytearray(60 << 20); time.sleep(600)'"
    outcome = sh(f"{eat} & {eat} & wait", tmp_path, memory=100 << 20)
    assert outcome.reason == "memory"
    assert 100 << 20 < outcome.peak < 200 << 20


def test_stopping(tmp_path: Path) -> None:
    stop = Event()
    Timer(0.5, stop.set).start()
    outcome = sh("sleep 600", tmp_path, stop=stop)
    assert outcome.reason == "stopped"


def test_the_death_of_the_one_who_asked(tmp_path: Path) -> None:
    script = (
        "import pathlib\nfrom kernel_depot.builder.supervised import run\n"
        "here = pathlib.Path.cwd()\n"
        "run(['sh', '-c', 'sleep 600 & echo $! > pid.part; mv pid.part pid; wait'], cwd=here,"
        " environment={'PATH': '/usr/bin:/bin'}, log=here / 'log', memory=1 << 30, seconds=600.0)\n"
    )
    asker = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    sleeper = int((tmp_path / "pid").read_text())
    asker.kill()
    asker.wait()
    while psutil.pid_exists(sleeper):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_no_network(tmp_path: Path) -> None:
    outcome = sh("cat /proc/net/dev", tmp_path)
    if not outcome.isolated:
        pytest.skip("this kernel lets no process leave the network")
    devices = [line.partition(":")[0].strip() for line in (tmp_path / "log").read_text().splitlines()[2:]]
    assert devices == ["lo"]
