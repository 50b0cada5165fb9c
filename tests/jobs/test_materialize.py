from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import select

from kernel_depot.bundle import read_bundle
from kernel_depot.catalog import queries
from kernel_depot.catalog.bundles import PinSetUnknown, resolve_bundle
from kernel_depot.catalog.database import reading
from kernel_depot.catalog.tables import Lease, Member
from kernel_depot.digest import sha256_file
from kernel_depot.jobs.depot import Depot, open_depot
from kernel_depot.jobs.materialize import AlreadyThere, Failed, Ingested, materialize_pin_set
from kernel_depot.jobs.progress import Stage, Step
from kernel_depot.jobs.zstd_maker import make_pending
from kernel_depot.pins.document import read_pin_set
from kernel_depot.platform import Arch, CudaTag, Platform
from kernel_depot.store.blobs import Form

PLATFORM = Platform(CudaTag(13, 0), Arch.X86_64)
PinFiles = Callable[..., Any]


def leftovers(depot: Depot) -> list[str]:
    """Return what a finished run must not leave."""
    data = depot.settings.data_dir
    with reading(depot.engine) as session:
        found = [lease.key for lease in session.exec(select(Lease))]
    for name in ("incoming", "outgoing", "store/tmp"):
        if (data / name).is_dir():
            found += [str(path) for path in (data / name).iterdir()]
    return found


def test_a_wheel_becomes_blobs_and_rows(depot: Depot, pin_files: PinFiles) -> None:
    pinned = pin_files(50)
    pin_set = read_pin_set(pinned.pins, allow_file_urls=True)
    steps: list[Step] = []
    report = materialize_pin_set(depot, pin_set, progress=steps.append)
    (outcome,) = report.wheels
    assert isinstance(outcome, Ingested)
    assert outcome.member_count == 53
    assert set(depot.store.list()) >= pinned.digests | {pinned.sha256}
    content = next(iter(pinned.files.values()))
    assert b"".join(depot.store.read(hashlib.sha256(content).hexdigest())) == content
    assert b"".join(depot.store.read(pinned.sha256)) == pinned.wheel.read_bytes()
    with reading(depot.engine) as session:
        members = {row.path: row for row in session.exec(select(Member))}
        assert len(members) == 53
        for path, content in pinned.files.items():
            assert members[path].sha256 == hashlib.sha256(content).hexdigest()
            assert members[path].size == len(content)
        assert queries.pin_set(session, pin_set.name) == pin_set
    assert [step.stage for step in steps][-1] is Stage.RECORDING
    assert max(step.members_done for step in steps) == 53
    assert leftovers(depot) == []


def test_a_second_run_downloads_nothing(depot: Depot, pin_files: PinFiles) -> None:
    pinned = pin_files(5)
    pin_set = read_pin_set(pinned.pins, allow_file_urls=True)
    materialize_pin_set(depot, pin_set)
    pinned.wheel.unlink()
    report = materialize_pin_set(depot, pin_set)
    assert report.wheels == (AlreadyThere(pin_set.pins[0]),)


def test_blobs_that_were_lost_are_made_again_without_a_download(depot: Depot, pin_files: PinFiles) -> None:
    pinned = pin_files(5)
    pin_set = read_pin_set(pinned.pins, allow_file_urls=True)
    materialize_pin_set(depot, pin_set)
    lost = min(pinned.digests)
    depot.store.delete(lost)
    if depot.store.path(pinned.sha256) is not None:
        pinned.wheel.unlink()
    (outcome,) = materialize_pin_set(depot, pin_set).wheels
    assert isinstance(outcome, Ingested)
    assert depot.store.has([lost]) == {lost}
    assert leftovers(depot) == []


def test_a_failure_is_recorded_told_in_the_bundle_and_cleared_by_success(
    depot: Depot, pin_files: PinFiles
) -> None:
    pinned = pin_files(5)
    pin_set = read_pin_set(pinned.pins, allow_file_urls=True)
    hidden = pinned.wheel.rename(pinned.wheel.with_suffix(".hidden"))
    (outcome,) = materialize_pin_set(depot, pin_set).wheels
    assert isinstance(outcome, Failed)
    with reading(depot.engine) as session:
        found = resolve_bundle(session, platform=PLATFORM)
    assert [wheel.reason for wheel in found.missing] == [outcome.problem["type"]]
    assert not found.complete
    hidden.rename(pinned.wheel)
    assert isinstance(materialize_pin_set(depot, pin_set).wheels[0], Ingested)
    with reading(depot.engine) as session:
        assert queries.failures(session, [pinned.sha256]) == []
        assert resolve_bundle(session, platform=PLATFORM).complete
    assert leftovers(depot) == []


def test_a_wheel_with_other_bytes_than_pinned_leaves_nothing(depot: Depot, pin_files: PinFiles) -> None:
    pinned = pin_files(5, sha256="0" * 64)
    pin_set = read_pin_set(pinned.pins, allow_file_urls=True)
    (outcome,) = materialize_pin_set(depot, pin_set).wheels
    assert isinstance(outcome, Failed)
    assert pinned.sha256 in json.dumps(outcome.problem)
    assert list(depot.store.list()) == []
    assert leftovers(depot) == []


def test_a_hostile_wheel_leaves_nothing(depot: Depot, pin_files: PinFiles) -> None:
    pinned = pin_files({"flashinfer_cubin/a.cubin": b"not a cubin"})
    pin_set = read_pin_set(pinned.pins, allow_file_urls=True)
    (outcome,) = materialize_pin_set(depot, pin_set).wheels
    assert isinstance(outcome, Failed)
    assert "cubin" in outcome.problem["type"]
    assert list(depot.store.list()) == []
    assert leftovers(depot) == []


def test_the_bundle_lists_what_was_ingested_and_is_answered_again(depot: Depot, pin_files: PinFiles) -> None:
    pinned = pin_files(7)
    pin_set = read_pin_set(pinned.pins, allow_file_urls=True)
    materialize_pin_set(depot, pin_set)
    with reading(depot.engine) as session:
        first = resolve_bundle(session, platform=PLATFORM)
    with reading(depot.engine) as session:
        second = resolve_bundle(session, platform=PLATFORM, pin_sets=[pin_set.name])
        assert queries.bundle_manifest(session, first.digest) == first.manifest
    assert (second.digest, second.manifest) == (first.digest, first.manifest)
    bundle = read_bundle(first.manifest, digest=first.digest, where="test")
    assert {a.path: a.sha256 for a in bundle.artifacts}.items() >= {
        path: hashlib.sha256(content).hexdigest() for path, content in pinned.files.items()
    }.items()
    assert [ref.revision for ref in bundle.pin_sets] == [pin_set.digest]
    assert (first.artifact_count, first.total_size) == (len(bundle.artifacts), bundle.total_size)


def test_a_pin_set_nobody_recorded(embedded: Depot) -> None:
    with reading(embedded.engine) as session, pytest.raises(PinSetUnknown):
        resolve_bundle(session, platform=PLATFORM, pin_sets=["nope"])


def test_zstd_forms_are_made_once_and_recorded(depot: Depot, pin_files: PinFiles) -> None:
    pinned = pin_files(10)
    materialize_pin_set(depot, read_pin_set(pinned.pins, allow_file_urls=True))
    assert make_pending(depot) >= 10
    assert make_pending(depot) == 0
    with reading(depot.engine) as session:
        rows = queries.blobs(session, sorted(pinned.digests))
        wheel = queries.blob(session, pinned.sha256)
    assert {row.zstd_state for row in rows} == {"made"}
    for row in rows:
        assert row.zstd_size == depot.store.size(row.sha256, form=Form.ZSTD)
        form = b"".join(depot.store.read(row.sha256, form=Form.ZSTD))
        assert hashlib.sha256(form).hexdigest() == row.zstd_sha256
    assert wheel is not None
    assert wheel.zstd_state == "not_worth"


def test_many_threads_ask_for_one_wheel_and_one_brings_it(depot: Depot, pin_files: PinFiles) -> None:
    pin_set = read_pin_set(pin_files(60).pins, allow_file_urls=True)
    materialize_pin_set(depot, pin_set, cuda=[])
    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(lambda _: materialize_pin_set(depot, pin_set).wheels[0], range(6)))
    assert sum(isinstance(outcome, Ingested) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, AlreadyThere) for outcome in outcomes) == 5


def test_many_processes_ask_for_one_wheel(
    embedded: Depot, pin_files: PinFiles, program: list[str], tmp_path: Path
) -> None:
    pinned = pin_files(400)
    command = [*program, "materialize", str(pinned.pins), "--allow-file-urls", "--json"]
    children = [
        subprocess.Popen(
            [*command, "--data-dir", str(embedded.settings.data_dir)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for _ in range(3)
    ]
    outcomes = []
    for child in children:
        out, err = child.communicate()
        assert child.returncode == 0, err
        outcomes.append(json.loads(out)["wheels"][0]["outcome"])
    assert sorted(outcomes) == ["already-there", "already-there", "ingested"]
    assert set(embedded.store.list()) >= pinned.digests
    assert leftovers(embedded) == []


def test_the_command_tells_the_problem_and_exits_1(
    pin_files: PinFiles, program: list[str], tmp_path: Path
) -> None:
    pinned = pin_files(3, sha256="0" * 64)
    command = [*program, "materialize", str(pinned.pins), "--data-dir", str(tmp_path / "d")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "urn:kernel-depot:problem:" in refused.stderr
    assert not (tmp_path / "d").exists()
    failed = subprocess.run([*command, "--allow-file-urls"], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "urn:kernel-depot:problem:wheel-" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_the_command_says_that_nothing_was_downloaded_again(
    pin_files: PinFiles, program: list[str], tmp_path: Path
) -> None:
    pinned = pin_files(3)
    command = [
        *program,
        "materialize",
        str(pinned.pins),
        "--data-dir",
        str(tmp_path / "d"),
        "--allow-file-urls",
    ]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1 brought in" in first.stdout
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "already there, nothing downloaded" in second.stdout
    assert "0 B downloaded" in second.stdout


def test_abandoned_downloads_are_removed_in_time(embedded: Depot) -> None:
    old = embedded.incoming / ("a" * 64 + ".part")
    fresh = embedded.incoming / ("b" * 64 + ".part")
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    open_depot(embedded.settings).close()
    assert not old.exists()
    assert fresh.exists()


def test_ingested_files_are_those_of_the_wheel_bit_by_bit(embedded: Depot, pin_files: PinFiles) -> None:
    pinned = pin_files(20, size=300_000)
    materialize_pin_set(embedded, read_pin_set(pinned.pins, allow_file_urls=True))
    for sha256 in pinned.digests:
        path = embedded.store.path(sha256)
        assert path is not None
        assert sha256_file(path) == sha256
