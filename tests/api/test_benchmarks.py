"""Benchmark reports: posted by nodes, named by their content, read and compared by anyone who may read."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SIDE = {"name": "FlashInfer ragged prefill, fa3", "version": "0.6.3", "median_ms": 1.0, "spread_ms": 0.1}
SHAPE = {
    "batch": 4,
    "rows": 512,
    "head_dim": 128,
    "num_qo_heads": 32,
    "num_kv_heads": 8,
    "causal": True,
    "seed": 0,
}
REPORT: dict[str, Any] = {
    "schema": 1,
    "benchmark": "ragged-prefill",
    "machine": {"gpu": "NVIDIA H200", "driver": "580"},
    "rows": [{"shape": SHAPE, "opponent": SIDE, "challenger": {**SIDE, "name": "mine"}, "ratio": 1.0}],
}


def test_a_report_is_kept_once_under_the_digest_of_its_content(server: Any) -> None:
    with server.client(server.token("node")) as node, server.client(server.token("read")) as reader:
        first = node.post("/v1/benchmarks", json=REPORT)
        again = node.post("/v1/benchmarks", json=REPORT)
        assert first.status_code == 201, first.text
        assert again.json() == first.json()
        digest = first.json()["digest"]
        listed = reader.get("/v1/benchmarks").json()["benchmarks"]
        assert [item["digest"] for item in listed].count(digest) == 1
        kept = reader.get(f"/v1/benchmarks/{digest}").json()
        assert kept["rows"][0]["opponent"]["name"] == SIDE["name"]
        assert kept["machine"]["gpu"] == "NVIDIA H200"


def test_a_reader_may_not_post(server: Any) -> None:
    with server.client(server.token("read")) as reader:
        refused = reader.post("/v1/benchmarks", json=REPORT)
    assert refused.status_code == 403
    assert refused.json()["type"].endswith("scope-insufficient")


def change(path: list[Any], value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(report: dict[str, Any]) -> None:
        for key in path[:-1]:
            report = report[key]
        report[path[-1]] = value

    return apply


@pytest.mark.parametrize(
    "wrong",
    [
        change(["schema"], 2),
        change(["benchmark"], "decode"),
        change(["rows"], []),
        change(["rows", 0, "opponent", "median_ms"], -1),
        change(["machine"], {}),
        change(["more"], 1),
        change(["rows", 0, "shape"], {"batch": 4, "rows": 512}),
        change(["rows", 0, "shape", "batch"], True),
        change(["rows", 0, "shape", "seed"], 2**60),
        change(["rows", 0, "opponent", "spread_ms"], None),
        change(["rows", 0, "challenger", "relative_error"], math.nan),
        change(["rows", 0, "ratio"], math.inf),
        change(["machine", "matmul_tflops"], math.nan),
        change(["machine", "torch"], 2**53),
        change(["machine", "gpu"], "NUL\0"),
    ],
)
def test_what_is_no_report_is_refused_and_not_kept(server: Any, wrong: Any) -> None:
    report = copy.deepcopy(REPORT)
    wrong(report)
    with server.client(server.token("admin")) as client:
        before = client.get("/v1/benchmarks").json()
        body = json.dumps(report)  # httpx's own would refuse what is no JSON: NaN
        refused = client.post("/v1/benchmarks", content=body, headers={"content-type": "application/json"})
        assert refused.status_code in (400, 422), refused.text
        assert refused.headers["content-type"] == "application/problem+json"
        assert client.get("/v1/benchmarks").json() == before


def test_an_unknown_digest_is_a_problem(server: Any) -> None:
    with server.client(server.token("read")) as reader:
        answer = reader.get("/v1/benchmarks/" + "0" * 64)
    assert answer.status_code == 404
    assert answer.json()["type"].endswith("benchmark-unknown")


def test_the_command_compares_a_file_with_a_report_on_the_server(server: Any, tmp_path: Path) -> None:
    slower = copy.deepcopy(REPORT)
    slower["rows"][0]["challenger"]["median_ms"] = 3.0
    path = tmp_path / "after.json"
    path.write_text(json.dumps(slower))
    with server.client(server.token("node")) as node:
        digest = node.post("/v1/benchmarks", json=REPORT).json()["digest"]
        url = str(node.base_url)
    command = [sys.executable, "-m", "kernel_depot.cli.main", "bench", "compare", digest, str(path)]
    command += ["--server", url, "--token", server.token("read")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fa3: no difference" in done.stdout
    assert "mine: slower, x3.000" in done.stdout


def test_the_documented_example_can_be_posted_by_the_command_and_compared(
    server: Any, tmp_path: Path
) -> None:
    with server.client() as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
    (example,) = schemas["ReportDocument"]["examples"]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(example))
    command = [sys.executable, "-m", "kernel_depot.cli.main", "bench"]

    def run(*arguments: str, scope: str) -> Any:
        options = ["--server", server.url, "--token", server.token(scope), "--json"]
        done = subprocess.run([*command, *arguments, *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    digest = run("post", str(path), scope="node")["digest"]
    lines = run("compare", digest, str(path), scope="read")["lines"]
    assert len(lines) == 2
    assert all(line.endswith("no difference") for line in lines)
