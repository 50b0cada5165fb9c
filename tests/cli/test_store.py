"""`kernel-depot store` against a real server."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "kernel_depot.cli.main"]


@pytest.fixture
def depot(tmp_path: Path, make_wheel: Callable[..., Path]) -> Iterator[tuple[str, Path]]:
    """A server with one wheel; its URL and its data directory."""
    wheel = make_wheel({"flashinfer_cubin/cubins/001/checksums.txt": os.urandom(5000)})
    pins = tmp_path / "pins.toml"
    pins.write_text(
        f'[flashinfer-cubin.cu130.x86_64]\nfilename = "{wheel.name}"\nurl = "{wheel.as_uri()}"\n'
        f'sha256 = "{hashlib.sha256(wheel.read_bytes()).hexdigest()}"\n'
    )
    options = ["--data-dir", str(tmp_path / "depot"), "--allow-file-urls"]
    subprocess.run([*COMMAND, "materialize", str(pins), *options], check=True, stdout=subprocess.DEVNULL)
    process = subprocess.Popen(
        [*COMMAND, "serve", *options, "--port", "0", "--allow-anonymous"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    match = re.search(r"http://\S+", process.stdout.readline())
    assert match is not None
    yield match.group(), tmp_path / "depot"
    process.terminate()
    process.wait(60)
    process.stdout.close()


def scrub(url: str, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [*COMMAND, "store", "scrub", "--server", url, *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_scrub_mends_what_it_can_and_fails_for_what_it_cannot(depot: tuple[str, Path]) -> None:
    url, data_dir = depot
    code, told = scrub(url, "--json")
    assert (code, json.loads(told)["kind"]) == (0, "scrub")
    code, told = scrub(url, "--follow")
    assert code == 0
    assert re.search(r"succeeded: \d+ blobs, .+, 0 damaged\n", told)
    blobs = sorted((data_dir / "store" / "blobs").rglob("*"), key=lambda path: path.stat().st_size)
    victim = next(path for path in blobs if path.is_file() and path.stat().st_size == 5000)
    victim.chmod(0o644)
    victim.write_bytes(b"torn")
    code, told = scrub(url, "--follow")
    assert code == 0
    assert f"  mended   {victim.name}\n" in told
    assert hashlib.sha256(victim.read_bytes()).hexdigest() == victim.name
