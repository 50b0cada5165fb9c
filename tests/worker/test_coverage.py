from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernel_depot.builder.plan import parse_plan
from kernel_depot.platform import Arch, CudaTag, Platform, Sm
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.coverage import Asked, compiled_here, read_record
from kernel_depot.worker.errors import RecordUnreadable
from kernel_depot.worker.sync import SyncRequest, sync

PLATFORM = Platform(CudaTag(13, 0), Arch.X86_64, Sm(9, 0))
DECODE = (
    "single_decode_with_kv_cache_dtype_q_f16_dtype_kv_f16_dtype_o_f16_head_dim_qk_64_head_dim_vo_64_posenc_0"
    "_use_swa_False_use_logits_cap_False"
)


@pytest.fixture
def cache(upstream: Any, make_bundle: Any, tmp_path: Path) -> Cache:
    upstream.publish(make_bundle(upstream, {"flashinfer_jit_cache/jit_cache/norm/norm.so": b"norm"}))
    cache = Cache(tmp_path / "cache")
    sync(SyncRequest(), endpoint=upstream.endpoint(), platform=PLATFORM, cache=cache)
    return cache


def coverage(cache: Cache, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from kernel_depot.cli.coverage import app; app(standalone_mode=False);"
        "heavy = {'rfc8785', 'packaging', 'sqlalchemy'} & set(sys.modules); assert not heavy, heavy"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "--cache", str(cache.root), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )


def record(path: Path, *lines: tuple[str, bool, str]) -> Path:
    path.write_text(
        "".join(
            json.dumps({"module": module, "found": found, "flashinfer": version}) + "\n"
            for module, found, version in lines
        )
    )
    return path


def test_what_was_lacking_is_a_plan_that_build_takes(cache: Cache, tmp_path: Path) -> None:
    asked = record(
        tmp_path / "record",
        ("norm", True, "0.6.3"),
        (DECODE, False, "0.6.3"),
        ("page", False, "0.6.3"),
        ("norm", False, "0.6.3"),  # synced since
        ("vllm_comm", False, "0.6.3"),
        (DECODE, False, "0.6.3"),
        ("rope", False, "0.7.4"),
    )
    done = coverage(cache, "--record", str(asked))
    plan = parse_plan(done.stdout, where="stdout")
    assert [request.uri for request in plan.requests] == ["page", DECODE]
    assert (plan.source.version, str(plan.cuda), [str(sm) for sm in plan.sms]) == ("0.6.3", "cu130", ["sm90"])
    assert '#   "vllm_comm"' in done.stdout
    assert "rope" not in done.stdout
    assert "0.7.4" in done.stderr
    answer = json.loads(coverage(cache, "--record", str(asked), "--json").stdout)
    assert answer["lacking"] == ["page", DECODE, "vllm_comm"]
    assert answer["other_versions"] == ["0.7.4"]
    assert answer["plan"] == done.stdout


def test_what_flashinfer_compiled_is_taken_without_a_record(cache: Cache, tmp_path: Path) -> None:
    for name in ("0.6.3/90a/cached_ops/page", "0.6.3/90a/cached_ops/norm", "0.6.30/90a/cached_ops/rope"):
        directory = cache.root / "workspace/.cache/flashinfer" / name
        directory.mkdir(parents=True)
        (directory / "build.ninja").touch()
    (cache.root / "workspace/.cache/flashinfer/0.6.3/90a/cached_ops/tmp").mkdir()
    assert compiled_here(cache.root / "workspace") == [
        Asked("norm", "0.6.3", found=False),
        Asked("page", "0.6.3", found=False),
        Asked("rope", "0.6.30", found=False),
    ]
    done = coverage(cache, "--workspace", str(cache.root / "workspace"))
    assert [request.uri for request in parse_plan(done.stdout, where="stdout").requests] == ["page"]
    assert "0.6.30" in done.stderr


def test_nothing_lacking_is_said(cache: Cache, tmp_path: Path) -> None:
    done = coverage(cache, "--record", str(record(tmp_path / "record", ("norm", True, "0.6.3"))))
    assert done.stdout == "# Nothing was asked for that the bundle lacks.\n"


@pytest.mark.parametrize("line", ["", "norm", "[]", '{"module": 1, "found": true, "flashinfer": ""}'])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    path = record(tmp_path / "record", ("norm", True, "0.6.3"))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(RecordUnreadable, match="line 2"):
        read_record(path)


def test_no_record_is_said(tmp_path: Path) -> None:
    with pytest.raises(RecordUnreadable, match="run --record"):
        read_record(tmp_path / "none")
