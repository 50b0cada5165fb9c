"""The demo, as a new user runs it: in a process of its own, in an empty directory."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from kernel_depot.pins.document import read_pin_set
from kernel_depot.platform import Arch
from kernel_depot.shipped import shipped_dir

HOST = Arch.parse(os.uname().machine)


def demo(tmp_path: Path, *options: str | Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "kernel_depot.cli.main", "demo", "--json", *map(str, options)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def tvm_ffi_pins(tmp_path: Path, extra: str = "") -> Path:
    """The shipped pins of apache-tvm-ffi alone: small, and on the package index."""
    tables = (shipped_dir("pins") / "flashinfer-0.6.3.toml").read_text().split("\n[")
    wanted = [f"[{table}\n" for table in tables[1:] if table.startswith("apache_tvm_ffi.cu130")]
    path = tmp_path / "tvm-ffi.toml"
    path.write_text("\n".join(wanted) + extra)
    assert len(read_pin_set(path).pins) == 2
    return path


def said(summary: dict[str, Any], step: str) -> list[str]:
    return [line["said"] for line in summary["lines"] if line["step"] == step]


@pytest.mark.network
def test_real_wheels_of_both_archs_go_the_whole_way_and_are_fetched_once(tmp_path: Path) -> None:
    pins = tvm_ffi_pins(tmp_path)
    code, first = demo(tmp_path, "--pins", pins, "--all-archs")
    assert code == 0
    assert said(first, "wheel") == ["brought in", "brought in"]
    assert said(first, "sync") == ["synced", "synced"]
    assert said(first, "smoke: tvm-ffi") == ["pass"]
    assert said(first, "smoke") == ["skipped: other CPU"]
    machines = [line["detail"].split(",")[0] for line in first["lines"] if line["step"] == "inspect"]
    assert sorted(machines) == ["ELF aarch64", "ELF x86_64"]
    assert first["downloaded"] > 3_000_000
    assert list((tmp_path / ".depot" / "worker" / "current" / "files").rglob("libtvm_ffi.so"))

    code, second = demo(tmp_path, "--pins", pins, "--all-archs")
    assert code == 0
    assert second["downloaded"] == 0
    assert said(second, "wheel") == ["already there", "already there"]
    assert said(second, "sync") == ["nothing new", "nothing new"]
    assert said(second, "pins") == ["already current"]


def local_pins(tmp_path: Path, wheel: Path, url: str) -> Path:
    path = tmp_path / "local.toml"
    path.write_text(
        f'[flashinfer_cubin.cu130.{HOST}]\nfilename = "{wheel.name}"\n'
        f'sha256 = "{hashlib.sha256(wheel.read_bytes()).hexdigest()}"\nurl = "{url}"\n'
    )
    return path


def test_what_cannot_be_reached_is_said_and_fails_only_when_strict(tmp_path: Path, make_wheel: Any) -> None:
    wheel = make_wheel({"flashinfer_cubin/__init__.py": b""})
    pins = local_pins(tmp_path, wheel, f"https://github.com.invalid/{wheel.name}")
    environment = {"KERNEL_DEPOT_ALLOWED_HOSTS": '["github.com.invalid"]'}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        code, summary = demo(tmp_path, "--pins", pins)
        assert said(summary, "wheel") == ["unreachable"]
        assert code == 0
        code, summary = demo(tmp_path, "--pins", pins, "--strict")
        assert said(summary, "wheel") == ["unreachable"]
        assert code == 1


def test_wrong_bytes_are_a_failure_not_unreachable(tmp_path: Path, make_wheel: Any) -> None:
    wheel = make_wheel({"flashinfer_cubin/__init__.py": b""})
    pins = local_pins(tmp_path, wheel, f"file://{tmp_path}/{wheel.name}")
    shutil.copy(wheel, tmp_path / wheel.name)
    with (tmp_path / wheel.name).open("r+b") as file:
        file.seek(40)
        file.write(b"\0\0")
    code, summary = demo(tmp_path, "--pins", pins, "--allow-file-urls")
    assert said(summary, "wheel") == ["failed: wheel-hash-mismatch"]
    assert code == 1


def _hears_hangups() -> None:
    """A test run under nohup hands down that hang-ups are ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _serves(process: psutil.Process) -> bool:
    try:
        return "serve" in process.cmdline()
    except psutil.NoSuchProcess:  # it ended meanwhile
        return False


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_demo_that_is_ended_early_takes_its_server_with_it(
    tmp_path: Path, make_wheel: Any, name: str
) -> None:
    wheel = make_wheel({"flashinfer_cubin/__init__.py": b""})
    pins = local_pins(tmp_path, wheel, f"file://{wheel}")
    command = [
        sys.executable,
        "-m",
        "kernel_depot.cli.main",
        "demo",
        "--pins",
        str(pins),
        "--allow-file-urls",
    ]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=_hears_hangups,
    ) as running:
        watched = psutil.Process(running.pid)
        servers: list[psutil.Process] = []
        while not servers:
            assert running.poll() is None, running.stderr and running.stderr.read()
            servers = [child for child in watched.children() if _serves(child)]
            time.sleep(0.02)
        running.send_signal(getattr(signal, name))
        assert running.wait(60) != 0
    psutil.wait_procs(servers, timeout=60)
    assert not any(server.is_running() for server in servers)


def test_no_server_is_left_behind(tmp_path: Path, make_wheel: Any) -> None:
    wheel = make_wheel({"flashinfer_cubin/__init__.py": b""})
    pins = local_pins(tmp_path, wheel, f"file://{wheel}")
    code, _ = demo(tmp_path, "--pins", pins, "--allow-file-urls", "--data-dir", tmp_path / "mine")
    assert code == 0
    left = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path / "mine") in (process.info["cmdline"] or [])
    ]
    assert left == []
