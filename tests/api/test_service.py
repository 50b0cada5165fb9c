"""From pins over HTTP to bundles, artifacts and modules: one depot, stocked once through its own API."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import tvm_ffi.libinfo
import zstandard

from kernel_depot.bundle import ArtifactKind, read_bundle
from kernel_depot.jobs.depot import open_depot
from kernel_depot.jobs.engine import start_engine
from kernel_depot.platform import Arch
from kernel_depot.settings import load_settings

ARCH = Arch.parse(platform.machine())
LIBRARY = Path(tvm_ffi.libinfo.find_libtvm_ffi()).read_bytes()


@dataclass
class Stocked:
    """A server whose wheels were brought in by a job, and what is in them."""

    server: Any
    client: httpx.Client
    job: dict[str, Any]
    created: httpx.Response
    modules: dict[str, bytes]
    pins: str


def pin_text(project: str, wheel: Path) -> str:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return (
        f"[{project}.cu130.{ARCH}]\n"
        f'filename = "{wheel.name}"\nsha256 = "{digest}"\nurl = "{wheel.as_uri()}"\n\n'
    )


def finished(client: httpx.Client, location: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        job = client.get(location).raise_for_status().json()
        if job["state"] in ("succeeded", "failed"):
            return job
        assert time.monotonic() < deadline, job
        time.sleep(0.05)


@pytest.fixture(scope="module")
def stocked(
    make_wheel: Callable[..., Path], serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stocked]:
    modules = {name: LIBRARY + name.encode() for name in ("norm", "page", "rope")}
    tag = f"cp39-abi3-manylinux_2_28_{ARCH}"
    jit = make_wheel(
        {f"flashinfer_jit_cache/jit_cache/{name}/{name}.so": code for name, code in modules.items()},
        project="flashinfer_jit_cache",
        version="0.6.3+cu130",
        tag=tag,
    )
    ffi = make_wheel(
        {"tvm_ffi/lib/libtvm_ffi.so": LIBRARY}, project="apache_tvm_ffi", version="0.1.3", tag=tag
    )
    text = pin_text("flashinfer_jit_cache", jit) + pin_text("apache_tvm_ffi", ffi)
    depot = open_depot(
        load_settings(data_dir=tmp_path_factory.mktemp("stocked"), allow_anonymous=True, allow_file_urls=True)
    )
    engine = start_engine(depot)
    try:
        with serve(depot) as server:
            client = server.client()
            created = client.post(
                "/v1/pins?name=trial", content=text, headers={"content-type": "application/toml"}
            )
            answer = client.post("/v1/materialize", json={"pins": ["trial"]})
            assert answer.status_code == 202, answer.text
            job = finished(client, answer.headers["location"])
            yield Stocked(server, client, job, created, modules, text)
    finally:
        engine.close()
        depot.close()


def resolve(stocked: Stocked, **parameters: str) -> httpx.Response:
    return stocked.client.get("/v1/resolve", params={"cuda": "13.0", "arch": str(ARCH), **parameters})


def test_pins_are_recorded_once(stocked: Stocked) -> None:
    assert stocked.created.status_code == 201
    assert stocked.created.headers["location"] == "/v1/pins/trial"
    document = stocked.created.json()
    assert document["text"] == stocked.pins
    assert {pin["project"] for pin in document["pins"]} == {"flashinfer_jit_cache", "apache_tvm_ffi"}
    again = stocked.client.post(
        "/v1/pins?name=trial",
        content="# only a comment more\n" + stocked.pins,
        headers={"content-type": "application/toml"},
    )
    assert again.status_code == 200
    assert again.json()["revision"] == document["revision"]
    assert stocked.client.get("/v1/pins/trial").json()["revision"] == document["revision"]
    assert [item["name"] for item in stocked.client.get("/v1/pins").json()["pin_sets"]] == ["trial"]


def test_job_tells_bytes_members_and_outcomes(stocked: Stocked) -> None:
    job = stocked.job
    assert job["state"] == "succeeded"
    assert job["problem"] is None
    assert job["asked_by"] == "anonymous"
    assert job["finished_at"] is not None
    assert {wheel["outcome"] for wheel in job["wheels"]} == {"ingested"}
    progress = job["progress"]
    assert progress["members_done"] == progress["members_total"] == 3 + 1 + 2 * 3
    assert progress["bytes_done"] == progress["bytes_total"]
    assert job["id"] in [item["id"] for item in stocked.client.get("/v1/jobs").json()["jobs"]]


def test_bundle_is_resolved_and_read_back(stocked: Stocked) -> None:
    answer = resolve(stocked)
    found = answer.raise_for_status().json()
    assert answer.headers["etag"] == f'"{found["digest"]}"'
    assert found["complete"] is True
    assert found["missing"] == []
    assert found["platform"] == {"cuda": "cu130", "arch": str(ARCH), "sm": None}
    assert {line["verdict"] for line in found["trace"]} == {"taken"}
    manifest = stocked.client.get(f"/v1/bundles/{found['digest']}")
    assert manifest.headers["content-type"] == "application/json"
    bundle = read_bundle(manifest.content, digest=found["digest"], where="test")
    assert len(bundle.artifacts) == found["artifact_count"]
    assert bundle.total_size == found["total_size"]
    modules = {a.module: a for a in bundle.artifacts if a.kind is ArtifactKind.MODULE}
    for name, code in stocked.modules.items():
        blob = stocked.client.get(f"/v1/blobs/sha256/{modules[name].sha256}")
        assert blob.content == code


def test_nothing_new_is_a_304(stocked: Stocked) -> None:
    etag = resolve(stocked).headers["etag"]
    parameters = {"cuda": "cu130", "arch": str(ARCH)}
    answer = stocked.client.get("/v1/resolve", params=parameters, headers={"if-none-match": etag})
    assert (answer.status_code, answer.content) == (304, b"")
    assert stocked.client.get(
        "/v1/resolve", params=parameters, headers={"if-none-match": '"' + "0" * 64 + '"'}
    ).is_success


def test_manifest_as_zstd_and_by_condition(stocked: Stocked) -> None:
    digest = resolve(stocked).json()["digest"]
    url = f"/v1/bundles/{digest}"
    with stocked.client.stream("GET", url, headers={"accept-encoding": "zstd"}) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == "zstd"
    assert answer.headers["etag"] == f'"{digest}-zstd"'
    assert hashlib.sha256(zstandard.decompress(raw)).hexdigest() == digest
    assert "immutable" in answer.headers["cache-control"]
    assert stocked.client.get(url, headers={"if-none-match": f'"{digest}"'}).status_code == 304
    head = stocked.client.head(url)
    assert int(head.headers["content-length"]) == len(stocked.client.get(url).content)
    unknown = stocked.client.get(f"/v1/bundles/{'0' * 64}")
    assert unknown.json()["type"].endswith(":bundle-unknown")


@pytest.mark.parametrize("spelling", ["norm,page", "page, norm", "norm"])
def test_modules_are_selected(stocked: Stocked, spelling: str) -> None:
    found = resolve(stocked, modules=spelling).raise_for_status().json()
    manifest = stocked.client.get(f"/v1/bundles/{found['digest']}").content
    bundle = read_bundle(manifest, digest=found["digest"], where="test")
    wanted = {name.strip() for name in spelling.split(",")}
    assert {a.module for a in bundle.artifacts if a.kind is ArtifactKind.MODULE} == wanted
    assert any(a.kind is ArtifactKind.TVM_FFI for a in bundle.artifacts)


def test_all_modules_is_the_whole_bundle(stocked: Stocked) -> None:
    assert resolve(stocked, modules="all").json()["digest"] == resolve(stocked).json()["digest"]


@pytest.mark.parametrize(
    ("parameters", "status", "kind"),
    [
        ({"cuda": "12.8"}, 404, "nothing-fits"),
        ({"arch": "riscv"}, 400, "platform-invalid"),
        ({"cuda": "new"}, 400, "platform-invalid"),
        ({"sm": "x"}, 400, "platform-invalid"),
        ({"modules": "nrom"}, 404, "module-unknown"),
        ({"pins": "other"}, 404, "pin-set-unknown"),
        ({"cud": "13.0"}, 400, "parameter-unknown"),
    ],
)
def test_questions_without_an_answer(
    stocked: Stocked, parameters: dict[str, str], status: int, kind: str
) -> None:
    answer = resolve(stocked, **parameters)
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:kernel-depot:problem:{kind}")


def test_module_redirects_to_its_blob(stocked: Stocked) -> None:
    parameters = {"cuda": "130", "arch": str(ARCH)}
    answer = stocked.client.get("/v1/modules/norm", params=parameters)
    assert answer.status_code == 302
    digest = hashlib.sha256(stocked.modules["norm"]).hexdigest()
    assert answer.headers["location"] == f"/v1/blobs/sha256/{digest}"
    followed = stocked.client.get("/v1/modules/norm", params=parameters, follow_redirects=True)
    assert followed.content == stocked.modules["norm"]
    assert stocked.client.get("/v1/modules/nrom", params=parameters).status_code == 404
    assert stocked.client.get("/v1/modules/norm").status_code == 400


def test_artifacts_are_paged_with_their_inspection(stocked: Stocked) -> None:
    seen: list[dict[str, Any]] = []
    url: str | None = "/v1/artifacts?limit=2&kind=module&project=flashinfer-jit-cache"
    while url is not None:
        answer = stocked.client.get(url).raise_for_status()
        page = answer.json()
        assert len(page["artifacts"]) <= 2
        seen += page["artifacts"]
        link = re.fullmatch(r'<(/v1/artifacts\?[^>]*)>; rel="next"', answer.headers.get("link", ""))
        assert (link is None) == (page["next"] is None)
        url = link[1] if link else None
    assert [item["module"] for item in seen] == sorted(stocked.modules)
    for item in seen:
        assert item["inspection"]["machine"] == str(ARCH)
        assert item["inspection"]["soname"] == "libtvm_ffi.so"
        assert "libc.so.6" in item["inspection"]["needed"]


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("module=norm", 1),
        ("kind=tvm_ffi", 1),
        ("project=Apache_TVM.ffi&kind=tvm_ffi", 1),
        ("project=Apache_TVM.ffi&kind=module", 0),
        (f"arch={ARCH}&cuda=cu130&kind=module", 3),
        ("cuda=cu128&kind=module", 0),
        ("sm=sm90a", 0),
    ],
)
def test_artifacts_are_filtered(stocked: Stocked, query: str, count: int) -> None:
    assert len(stocked.client.get(f"/v1/artifacts?{query}").json()["artifacts"]) == count


@pytest.mark.parametrize("cursor", ["%21", "a", "_w", "é"])
def test_foreign_cursors_are_refused(stocked: Stocked, cursor: str) -> None:
    answer = stocked.client.get("/v1/artifacts", params={"cursor": cursor})
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:kernel-depot:problem:cursor-invalid")


def test_a_missing_wheel_is_told_and_a_failed_job_says_why(stocked: Stocked, tmp_path: Path) -> None:
    digest = "ab" * 32
    name = f"apache_tvm_ffi-0.1.3-cp39-abi3-manylinux_2_28_{ARCH}.whl"
    document = {
        "apache_tvm_ffi": {
            "cu120": {str(ARCH): {"filename": name, "sha256": digest, "url": (tmp_path / name).as_uri()}}
        }
    }
    answer = stocked.client.post("/v1/pins?name=absent", json=document)
    assert answer.status_code == 201, answer.text
    before = resolve(stocked, cuda="12.0").json()
    assert before["complete"] is False
    assert [wheel["sha256"] for wheel in before["missing"]] == [digest]
    job = finished(
        stocked.client,
        stocked.client.post("/v1/materialize", json={"pins": ["absent"]}).headers["location"],
    )
    assert job["state"] == "failed"
    assert job["problem"]["type"].startswith("urn:kernel-depot:problem:")
    after = resolve(stocked, cuda="12.0").json()
    assert after["missing"][0]["reason"] == job["problem"]["type"]
    module = stocked.client.get("/v1/modules/norm", params={"cuda": "cu120", "arch": str(ARCH)})
    assert module.json()["type"].endswith(":module-unavailable")


def test_every_problem_of_a_pin_set_is_told_and_nothing_written(stocked: Stocked) -> None:
    before = stocked.client.get("/v1/pins").json()
    bad = stocked.pins.replace('sha256 = "', 'sha256 = "x').replace("filename", "filname", 1)
    answer = stocked.client.post(
        "/v1/pins?name=bad", content=bad, headers={"content-type": "application/toml"}
    )
    assert answer.status_code == 400
    assert answer.json()["type"].endswith(":pin-set-invalid")
    assert len(answer.json()["problems"]) >= 3
    as_json = stocked.client.post("/v1/pins?name=bad", json={"a": {"b": {"c": {}}}})
    assert as_json.json()["type"].endswith(":pin-set-invalid")
    assert stocked.client.get("/v1/pins").json() == before
    assert stocked.client.get("/v1/pins/bad").json()["type"].endswith(":pin-set-unknown")


@pytest.mark.parametrize(
    ("content", "media_type", "kind"),
    [
        (b"\xff\xfe", "application/toml", "request-invalid"),
        (b"= = =", "application/toml", "pin-set-invalid"),
        (b"{", "application/json", "request-invalid"),
        (b"[" * 100_000, "application/json", "request-invalid"),
        (b"[]", "application/json", "pin-set-invalid"),
        (b"a = " + b"[" * 100_000, "application/toml", "pin-set-invalid"),
        (b"", "text/html", "media-type-unsupported"),
        (b"", "", "media-type-unsupported"),
        (b"#" * (5 << 20), "application/toml", "body-too-large"),
    ],
    ids=range(9),
)
def test_bodies_that_are_no_pin_set(stocked: Stocked, content: bytes, media_type: str, kind: str) -> None:
    answer = stocked.client.post("/v1/pins?name=bad", content=content, headers={"content-type": media_type})
    assert answer.json()["type"] == f"urn:kernel-depot:problem:{kind}"


@pytest.mark.parametrize(
    "body", [{"pins": []}, {"pins": "trial"}, {"pin": ["trial"]}, {"arch": ["riscv"]}, {"pins": ["nobody"]}]
)
def test_jobs_that_cannot_be(stocked: Stocked, body: object) -> None:
    before = len(stocked.client.get("/v1/jobs").json()["jobs"])
    answer = stocked.client.post("/v1/materialize", json=body)
    assert answer.status_code in (400, 404)
    assert len(stocked.client.get("/v1/jobs").json()["jobs"]) == before


def test_unknown_job(stocked: Stocked) -> None:
    assert stocked.client.get("/v1/jobs/none").json()["type"].endswith(":job-unknown")


def test_metrics_tell_routes_bytes_and_jobs(stocked: Stocked) -> None:
    stocked.client.get(f"/v1/blobs/sha256/{'0' * 64}")
    stocked.client.get("/made/up/path")
    text = stocked.client.get("/metrics").text
    assert 'route="/v1/blobs/sha256/{sha256}",status="404"' in text
    assert "made" not in text
    assert re.search(r'kernel_depot_jobs\{state="succeeded"\} 1\.0', text)
    assert re.search(r'kernel_depot_sent_bytes_total\{route="/v1/resolve"\} [1-9]', text)
    assert "kernel_depot_request_seconds_bucket" in text


def test_documented_commands_work(
    stocked: Stocked, tmp_path: Path, run_documented: Callable[[str, Path, dict[str, str]], None]
) -> None:
    digest = resolve(stocked).json()["digest"]
    (tmp_path / "pins.toml").write_text(stocked.pins)
    run_documented(
        "api.md",
        tmp_path,
        {
            "DEPOT": stocked.server.url,
            "TOKEN": stocked.server.token("admin"),
            "BUNDLE": digest,
            "BLOB": hashlib.sha256(stocked.modules["norm"]).hexdigest(),
            "PROJECT": "flashinfer-jit-cache",
            "MODULE": "norm",
            "ARCH": str(ARCH),
            "JOB": stocked.job["id"],
        },
    )
    assert (
        (tmp_path / "blob").read_bytes() == (tmp_path / "module.so").read_bytes() == stocked.modules["norm"]
    )
    assert (tmp_path / "first-bytes").read_bytes() == stocked.modules["norm"][:100]
    assert hashlib.sha256((tmp_path / "bundle.json").read_bytes()).hexdigest() == digest
    assert json.loads((tmp_path / "bundle.json").read_bytes())["schema"] == 1


SOUND = {"filename": "apache_tvm_ffi-0.1.3-py3-none-any.whl", "sha256": "ab" * 32, "index": "pypi"}


@pytest.mark.parametrize(
    "change",
    [
        {"url": "https://github.com/\ud800/x.whl"},
        {"index": "\ud800"},
        {"index": "pypi\0"},
        {"size": 2**70},
        {"size": -1},
        {"size": float("inf")},
        {"\ud800": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("project", ["apache_tvm_ffi", "apache_tvm_ffi\ud800"])
def test_json_that_no_text_or_number_can_hold(stocked: Stocked, change: dict[str, Any], project: str) -> None:
    document = {project: {"cu110": {"x86_64": SOUND | change}}}
    answer = stocked.client.post(
        "/v1/pins?name=bad", content=json.dumps(document), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    assert stocked.client.get("/v1/pins/bad").status_code == 404
