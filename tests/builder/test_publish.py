"""From a plan to a pin set in a depot, against a real server: publishing, sharing, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kernel_depot.builder.compile import Stopped
from kernel_depot.builder.depot import Depot
from kernel_depot.builder.errors import DepotRefused, DepotUnreachable, PublishFailed
from kernel_depot.builder.publish import publish
from kernel_depot.jobs.uploads import PART

COMMAND = [sys.executable, "-m", "kernel_depot.cli.main"]
PLATFORM = ["--cuda", "cu130", "--arch", os.uname().machine]


def run(*arguments: object, code: int = 0) -> Any:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def built(bench: Any, *more: object, cache: str = "cache", code: int = 0) -> Any:
    return run(
        *("build", bench.root / "plan.toml", "--cache", bench.root / cache, "--out", bench.root / "out"),
        *("--cuda-home", bench.cuda, "--source", bench.wheel, *more),
        code=code,
    )


def plan(bench: Any, name: str, *modules: str) -> None:
    text = bench.text(*modules).replace('name = "bench"', f'name = "{name}"')
    (bench.root / "plan.toml").write_text(text)


def test_a_published_wheel_is_proposed_activated_resolved_and_synced(bench: Any, served: Any) -> None:
    plan(bench, "published", "norm", "page")
    report = built(bench, "--publish", served.url)
    publication = report["publication"]
    assert publication["active"] is False
    assert publication["replaced"] == []
    revision = publication["revision"]
    [known] = served.get("/v1/pins/published/revisions")["revisions"]
    assert (known["revision"], known["materialized"], known["current"]) == (revision, True, False)
    served.get("/v1/pins/published", status=404)

    answer = run("pins", "activate", "published", revision, "--server", served.url)
    [pin] = answer["pins"]
    assert (pin["store"], pin["url"], pin["index"], pin["sm"]) == (True, None, None, "sm90a")
    assert pin["sha256"] == report["wheel"]["sha256"]
    [known] = run("pins", "revisions", "published", "--server", served.url)["revisions"]
    assert known["current"] is True

    cache = bench.root / "node"
    run(
        *("sync", "--server", served.url, *PLATFORM, "--sm", "sm90a", "--pins", "published"),
        *("--cache", cache),
    )
    synced = {path.stem: path for path in (cache / "current/files").rglob("*.so")}
    assert set(synced) == {"norm", "page"}
    sha256 = {one["module"]: one["sha256"] for one in report["modules"]}
    assert hashlib.sha256(synced["norm"].read_bytes()).hexdigest() == sha256["norm"]
    statement = served.get(f"/v1/provenance/{report['wheel']['sha256']}")
    assert statement == json.loads(Path(report["statement"]).read_text())

    again = built(bench, "--publish", served.url)
    assert again["publication"] == {**publication, "active": True}
    plan(
        bench,
        "published",
        "norm",
        "page",
        "single_decode_with_kv_cache_dtype_q_f16_dtype_kv_f16_dtype_o_f16"
        "_head_dim_qk_128_head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_False",
    )
    part = built(bench, "--publish", served.url, "--modules", "page", "--activate")
    assert part["publication"]["replaced"] == [publication["filename"]]
    [pin] = served.get("/v1/pins/published")["pins"]
    assert pin["filename"] == part["publication"]["filename"] != publication["filename"]
    assert len(served.get("/v1/pins/published/revisions")["revisions"]) == 2


def test_a_module_that_the_depot_has_is_not_compiled(bench: Any, served: Any) -> None:
    plan(bench, "shared", "norm", "page")
    first = built(bench, "--shared", served.url, "--modules", "norm")
    made = bench.made()
    second = built(bench, "--shared", served.url, cache="other")
    assert {one["module"]: one["state"] for one in second["modules"]} == {"norm": "shared", "page": "built"}
    assert sorted(bench.made()[len(made) :]) == ["page.o"]
    third = built(bench, "--shared", served.url, "--dry-run", cache="third")
    assert {one["state"] for one in third["modules"]} == {"shared"}
    sha256 = {one["module"]: one["sha256"] for one in first["modules"]}
    assert sha256["norm"] == next(one["sha256"] for one in second["modules"] if one["module"] == "norm")


def test_what_was_built_before_is_shared_later(bench: Any, served: Any) -> None:
    plan(bench, "later", "page")
    (bench.root / "plan.toml").write_text((bench.root / "plan.toml").read_text().replace("sm90a", "sm80"))
    built(bench)
    built(bench, "--shared", served.url)
    other = built(bench, "--shared", served.url, cache="other")
    assert other["modules"][0]["state"] == "shared"
    assert bench.made() == ["page.o"]


def test_a_token_that_may_not_publish_is_told_before_anything_is_compiled(bench: Any, served: Any) -> None:
    plan(bench, "refused", "page")
    problem = built(bench, "--publish", served.url, "--token", served.token("node"), code=1)
    assert problem["type"].endswith(":build-depot-refused")
    assert problem["server_type"].endswith(":scope-insufficient")
    assert bench.made() == []
    reader = built(bench, "--shared", served.url, "--token", served.token("read"))
    assert reader["modules"][0]["state"] in ("built", "shared")  # it takes, and gives nothing


def test_options_that_contradict_each_other(bench: Any, served: Any) -> None:
    plan(bench, "wrong", "page")
    for more in (
        ["--publish", served.url, "--dry-run"],
        ["--publish", served.url, "--queue", served.url],
        ["--activate"],
        ["--pins", "x"],
    ):
        done = subprocess.run(
            [*COMMAND, "build", bench.root / "plan.toml", *more], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, more


def test_an_upload_that_was_broken_off_goes_on(served: Any, tmp_path: Path) -> None:
    data = os.urandom(2 * PART + 100)
    path = tmp_path / "file"
    path.write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    stop, sent = Event(), list[int]()

    def told(name: str, done: int, total: int | None) -> None:
        assert (name, total) == ("file", len(data))
        sent.append(done)
        stop.set()

    with Depot(served.url, token=None) as depot:
        with pytest.raises(Stopped):
            depot.upload(path, sha256=sha256, name="file", progress=told, stop=stop)
        assert sent == [PART]
        assert served.get(f"/v1/uploads/{sha256}")["missing"] == [1, 2]
        depot.upload(path, sha256=sha256, name="file", progress=told)
        assert sent == [PART, 2 * PART, len(data)]
        depot.upload(path, sha256=sha256, name="file", progress=told)
        assert len(sent) == 3
        with pytest.raises(DepotRefused) as caught:
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            depot.upload(path, sha256="ab" * 32, name="file", progress=told)
    assert caught.value.says("upload-mismatch")
    served.get(f"/v1/uploads/{'ab' * 32}", status=404)


def test_a_wheel_that_is_none_is_never_current(bench: Any, served: Any) -> None:
    report = bench.build(replace(bench.plan("page"), name="broken"))
    with zipfile.ZipFile(report.wheel.path, "a") as archive:
        archive.writestr("flashinfer_jit_cache/more.txt", "not in RECORD")
    sha256 = hashlib.sha256(report.wheel.path.read_bytes()).hexdigest()
    statement = report.statement.read_text().replace(report.wheel.sha256, sha256)
    report.statement.write_text(statement)
    size = report.wheel.path.stat().st_size
    broken = replace(report, wheel=replace(report.wheel, sha256=sha256, size=size))
    with Depot(served.url, token=None) as depot:
        with pytest.raises(PublishFailed, match="could not bring the wheel in") as caught:
            publish(broken, depot, activate=True, progress=lambda *_: None)
        [known] = depot.revisions("broken")["revisions"]
        with pytest.raises(DepotRefused) as refused:
            depot.activate("broken", known["revision"])
    assert caught.value.data["server_type"].endswith(":record-member-unlisted")
    assert refused.value.says("revision-not-materialized")
    served.get("/v1/pins/broken", status=404)


def test_a_depot_that_is_not_there(tmp_path: Path) -> None:
    with Depot("http://127.0.0.1:9", token=None, patience=0.3) as depot, pytest.raises(DepotUnreachable):
        depot.job("x")
    with pytest.raises(DepotUnreachable, match="not a depot's address"):
        Depot("depot.example", token=None)
