"""`kernel-depot builder` against a real server: builds claimed, lost, given back, cancelled and failed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from kernel_depot.digest import sha256_file

COMMAND = [sys.executable, "-m", "kernel_depot.cli.main"]
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(bench: Any, served: Any) -> Iterator[Start]:
    """Start builders, each with a cache of its own that has the source wheel."""
    with ExitStack() as stack:

        def begin(name: str, *more: str) -> subprocess.Popen[bytes]:
            cache = bench.root / name
            (cache / "wheels").mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bench.wheel, cache / "wheels" / sha256_file(bench.wheel))
            with (bench.root / f"{name}.log").open("ab") as log:
                process = subprocess.Popen(
                    [
                        *(*COMMAND, "builder", "--server", served.url, "--name", name, "--jobs", "1"),
                        *("--cache", cache, "--cuda-home", bench.cuda, "--poll", "0.2", *more),
                    ],
                    stdout=log,
                    stderr=log,
                )
            stack.callback(ended, process, bench.root / name)
            return process

        yield begin


def ended(process: subprocess.Popen[bytes], cache: Path) -> None:
    """Make sure that a builder and all that it started are gone."""
    if process.poll() is None:
        process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(_works_in(one, cache) for one in psutil.process_iter()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _works_in(process: psutil.Process, directory: Path) -> bool:
    try:
        return Path(process.cwd()).is_relative_to(directory)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def queued(bench: Any, served: Any, name: str, *modules: str, **options: Any) -> str:
    text = bench.text(*modules).replace('name = "bench"', f'name = "{name}"')
    body = {"plan": text, "arch": os.uname().machine, **options}
    return str(served.post("/v1/builds", body, status=202)["id"])


def states(job: dict[str, Any]) -> dict[str, str]:
    return {one["module"]: one["state"] for one in job["modules"]}


def test_a_builder_that_was_killed_is_followed_and_nothing_is_compiled_twice(
    bench: Any, served: Any, start: Start
) -> None:
    hold = bench.cuda / "hold-page.o"
    hold.touch()
    # Each bench has a source wheel of its own, so the depot has none of its modules; norm has more files than
    # page, so it is compiled first.
    job_id = queued(bench, served, "killed", "page", "norm", activate=True)
    first = start("one")
    told = served.reached(job_id, lambda job: states(job) == {"norm": "built", "page": "compiling"})
    assert (told["state"], told["progress"]["members_done"]) == ("running", 1)
    assert served.get(f"/v1/builds/{job_id}")["builder"] == "one"
    first.kill()
    start("two")
    hold.unlink()
    job = served.reached(job_id, lambda job: job["finished_at"])
    assert (job["state"], job["problem"]) == ("succeeded", None)
    assert states(job) == {"norm": "shared", "page": "built"}
    assert (job["progress"]["members_done"], job["progress"]["members_total"]) == (2, 2)
    build = served.get(f"/v1/builds/{job_id}")
    assert (build["builder"], build["losses"], build["state"]) == ("two", 1, "ended")
    assert bench.made().count("norm.o") == 1
    [wheel] = job["wheels"]
    assert wheel["active"] is True
    [pin] = served.get("/v1/pins/killed")["pins"]
    assert (pin["sha256"], pin["store"]) == (wheel["sha256"], True)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_builder_asked_to_end_gives_the_build_back(
    bench: Any, served: Any, start: Start, sent: signal.Signals
) -> None:
    hold = bench.cuda / "hold-page.o"
    hold.touch()
    job_id = queued(bench, served, "ended", "page")
    builder = start("one")
    served.reached(job_id, lambda job: states(job) == {"page": "compiling"})
    builder.send_signal(sent)
    assert builder.wait(timeout=60) == 0
    job = served.get(f"/v1/jobs/{job_id}")
    assert (job["state"], states(job)) == ("queued", {"page": "planned"})
    assert served.get(f"/v1/builds/{job_id}")["losses"] == 0
    hold.unlink()
    assert start("two", "--once").wait(timeout=60) == 0
    assert served.get(f"/v1/jobs/{job_id}")["state"] == "succeeded"
    [known] = served.get("/v1/pins/ended/revisions")["revisions"][:1]
    assert (known["materialized"], known["current"]) == (True, False)


def test_a_cancelled_build_ends_and_the_builder_takes_the_next(bench: Any, served: Any, start: Start) -> None:
    (bench.cuda / "hold-cascade.o").touch()
    (bench.cuda / "hold-hungry.o").touch()
    job_id = queued(bench, served, "cancelled", "cascade")
    builder = start("one")
    served.reached(job_id, lambda job: states(job) == {"cascade": "compiling"})
    assert served.post(f"/v1/builds/{job_id}/cancel", {}, status=200)["state"] == "failed"
    served.post(f"/v1/builds/{job_id}/cancel", {}, status=409)
    failing = queued(bench, served, "failing", "rope", "norm")
    job = served.reached(failing, lambda job: job["finished_at"])
    assert builder.poll() is None
    assert job["state"] == "failed"
    assert job["problem"]["type"].endswith(":build-header-missing")
    assert "curand" in job["problem"]["remedy"]
    assert states(job) == {"rope": "failed", "norm": "built"}
    assert served.get(f"/v1/jobs/{job_id}")["problem"]["type"].endswith(":build-cancelled")
    served.get("/v1/pins/failing/revisions", status=404)


def test_a_plan_is_queued_by_the_command_and_refused_with_its_errors(
    bench: Any, served: Any, tmp_path: Path
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(bench.text("page").replace('name = "bench"', 'name = "command"'))
    command = [*COMMAND, "build", str(path), "--queue", served.url, "--pins", "mine", "--arch", "aarch64"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = served.get("/v1/jobs/" + done.stdout.strip().rpartition("/")[2])
    assert (job["kind"], job["state"]) == ("build", "queued")
    assert job["request"] == {
        "plan": "command", "cuda": "cu130", "arch": "aarch64",
        "modules": [], "sm": [], "pins": "mine", "activate": False,
    }  # fmt: skip
    for text, kind in (
        (bench.text("nrom"), "build-plan-invalid"),
        ("= = =", "build-plan-unreadable"),
        (bench.text("page", sm="hopper"), "build-plan-invalid"),
    ):
        problem = served.post("/v1/builds", {"plan": text}, status=400)
        assert problem["type"].endswith(f":{kind}"), problem
    assert "nearest: norm" in served.post("/v1/builds", {"plan": bench.text("nrom")}, status=400)["detail"]


def test_a_builder_that_is_refused_ends_and_says_why(bench: Any, served: Any, start: Start) -> None:
    assert start("one", "--token", served.token("read"), "--once").wait(timeout=60) == 1
    assert "scope-insufficient" in (bench.root / "one.log").read_text()
