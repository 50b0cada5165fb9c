"""Calls in forked children; each test runs in a process of one thread, as such calls must."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAD = """
import os, sys, time
from kernel_depot.errors import DepotError
from kernel_depot.wheels.errors import WheelDigestMismatch
from kernel_depot.wheels.forked import ChildDied, Forked, may_fork
assert may_fork()
def no_child_is_left():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False
"""


def run(body: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", "-c", HEAD + body, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_value_then_and_both_exceptions() -> None:
    body = """
mine = os.getpid()
child = Forked(lambda: {"pid": os.getpid(), "data": b"x" * 3_000_000}, then=lambda value: print(value["pid"], flush=True))
value = child.result()
assert value["pid"] != mine and len(value["data"]) == 3_000_000
child.proceed()
print(value["pid"])
child.close()
def fail(value=None):
    raise WheelDigestMismatch("wrong", where="here", expected="a", found="b")
for make in (lambda: Forked(fail), lambda: Forked(int, then=fail)):
    child = make()
    try:
        child.result()
        child.proceed()
    except WheelDigestMismatch as error:
        print(error.problem()["where"], error.expected, error.found)
    child.close()
    child.close()
assert no_child_is_left()
"""  # noqa: E501
    lines = run(body).split("\n")
    assert lines[0] == lines[1]
    assert lines[2:4] == ["here a b"] * 2


def test_a_killed_child_is_told_and_a_busy_one_is_ended() -> None:
    body = """
child = Forked(lambda: os.kill(os.getpid(), 9))
try:
    child.result()
except ChildDied as error:
    print(error.slug)
child.close()
started = time.monotonic()
child = Forked(lambda: time.sleep(50))
assert not child.wait(0.01)
child.close()
assert time.monotonic() - started < 40 and no_child_is_left()
"""
    assert run(body) == "child-died\n"


@pytest.mark.parametrize("how", ["kill", "end"])
def test_children_die_with_their_parent(tmp_path: Path, how: str) -> None:
    body = """
def grandparent():
    Forked(lambda: (open(f"{sys.argv[1]}/{os.getpid()}", "w").close(), time.sleep(50)))
    time.sleep(50)
Forked(lambda: (open(f"{sys.argv[1]}/{os.getpid()}", "w").close(), grandparent()))
while len(os.listdir(sys.argv[1])) < 2:
    time.sleep(0.01)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), 9)
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", HEAD + body, str(tmp_path), how], check=False, timeout=60)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_process_with_threads_may_not_fork() -> None:
    body = """
import threading
done = threading.Event()
thread = threading.Thread(target=done.wait)
thread.start()
print(may_fork())
done.set()
thread.join()
while not may_fork():  # the kernel's thread ends a moment after Python's
    time.sleep(0.01)
print(True)
"""
    assert run(body) == "False\nTrue\n"
