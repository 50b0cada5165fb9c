"""kill -9 of a process that ingests, at 20 moments: nothing wrong is published, the next run cleans up."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sqlmodel import select

from kernel_depot.catalog.database import open_database, reading
from kernel_depot.catalog.tables import Blob, Lease, Member, Wheel
from kernel_depot.digest import sha256_file
from kernel_depot.store.local import LocalStore

PinFiles = Callable[..., Any]
KILLS = 20


def blobs(data: Path) -> list[Path]:
    """Return every published file, in either form."""
    return [path for path in data.glob("store/blobs/sha256/*/*") if path.is_file()]


def check_published(data: Path) -> None:
    """Check that every public name holds the bytes it names, and every row has its bytes."""
    for path in blobs(data):
        assert sha256_file(path) == path.name
    if not (data / "catalog.sqlite").exists():
        return
    engine = open_database(f"sqlite:///{data}/catalog.sqlite")
    try:
        with engine.connect() as connection:
            if not engine.dialect.has_table(connection, "wheel"):
                return
        with reading(engine) as session:
            wheels = session.exec(select(Wheel)).all()
            known = {blob.sha256 for blob in session.exec(select(Blob))}
            members = session.exec(select(Member)).all()
        store = LocalStore(data / "store")
        assert store.has(known) == known
        for wheel in wheels:
            mine = [member for member in members if member.wheel == wheel.sha256]
            assert len(mine) == wheel.member_count
            assert {member.sha256 for member in mine if member.kind is not None} <= known
        assert {member.wheel for member in members} == {wheel.sha256 for wheel in wheels}
    finally:
        engine.dispose()


def leftovers(data: Path) -> list[str]:
    engine = open_database(f"sqlite:///{data}/catalog.sqlite")
    with reading(engine) as session:
        found = [lease.key for lease in session.exec(select(Lease))]
    engine.dispose()
    return found + [str(path) for name in ("incoming", "store/tmp") for path in (data / name).iterdir()]


def run_until_killed(command: Sequence[str], after: float) -> bool:
    """Run a command and kill it after so many seconds; tell whether it was still running."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            child.wait(after)
        except subprocess.TimeoutExpired:
            child.kill()
            return True
    return False


def run_until_published(command: Sequence[str], data: Path, count: int) -> bool:
    """Run a command and kill it once so many blobs have their public names; tell whether it still ran."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        while child.poll() is None:
            if len(blobs(data)) >= count:
                child.kill()
                return True
            time.sleep(0.002)
    return False


def test_killed_at_random_moments(pin_files: PinFiles, program: list[str], tmp_path: Path) -> None:
    small = pin_files(300)
    large = pin_files(40, project="flashinfer_jit_cache", size=400_000)
    text = small.pins.read_text() + large.pins.read_text()
    pins = tmp_path / "both.toml"
    pins.write_text(text)
    command = [*program, "materialize", str(pins), "--allow-file-urls", "--json", "--data-dir"]

    started = time.monotonic()
    subprocess.run([*command, str(tmp_path / "whole")], check=True, stdout=subprocess.DEVNULL)
    usual = time.monotonic() - started
    total = len(blobs(tmp_path / "whole"))

    rng = random.Random(20)
    data = tmp_path / "data"
    killed = 0
    for number in range(KILLS):
        if number % 2:
            killed += run_until_killed([*command, str(data)], usual * rng.uniform(0.2, 1.0))
        else:
            killed += run_until_published([*command, str(data)], data, rng.randrange(1, total))
        check_published(data)
        if number in (4, 9, 14):  # go on in a new place, else most runs would find all done
            data = tmp_path / f"data{number}"
    assert killed >= 5

    done = subprocess.run([*command, str(data)], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["failed"] == 0
    check_published(data)
    assert {path.name for path in blobs(data)} >= small.digests | {small.sha256, large.sha256}
    assert leftovers(data) == []
