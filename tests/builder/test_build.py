"""A build from plan to wheel, with a real generator, ninja and C++ compiler."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from kernel_depot.builder.build import State
from kernel_depot.builder.errors import (
    CompileFailed,
    CompilerOutOfMemory,
    CompileTimeout,
    HeaderMissing,
    MergeRefused,
    ModulesFailed,
    ModuleUriUnknown,
    SmUnsupported,
    SourceMismatch,
)
from kernel_depot.bundle import ArtifactKind
from kernel_depot.digest import sha256_file
from kernel_depot.platform import Sm
from kernel_depot.wheels.extract import Expectation, extract

DECODE = (
    "single_decode_with_kv_cache_dtype_q_f16_dtype_kv_f16_dtype_o_f16_head_dim_qk_128_head_dim_vo_128"
    "_posenc_0_use_swa_False_use_logits_cap_False"
)


def states(report: Any) -> dict[str, str]:
    return {module.uri: str(module.state) for module in report.modules}


def test_a_built_wheel_goes_through_the_wheels_room(bench: Any, tmp_path: Path) -> None:
    report = bench.build(bench.plan("norm", "page", DECODE))
    wheel = report.wheel.path
    assert wheel.name.startswith("flashinfer_jit_cache-9.9.9+cu130.bench-py3-none-manylinux_2_")
    staging = tmp_path / "staging"
    staging.mkdir()
    expect = Expectation(filename=wheel.name, sha256=report.wheel.sha256, arch=report.toolchain.arch)
    extracted = extract(wheel, staging=staging, expect=expect)
    modules = {one.module: one for one in extracted.members if one.kind is ArtifactKind.MODULE}
    assert set(modules) == {"norm", "page", DECODE}
    assert modules["norm"].sha256 == report.modules[0].built.sha256


def test_a_second_build_compiles_nothing_and_gives_the_same_bytes(bench: Any) -> None:
    plan = bench.plan("norm", "page")
    first = bench.build(plan)
    made = bench.made()
    shutil.rmtree(bench.root / "cache" / "sources")
    second = bench.build(plan, out="again", source=None)
    assert bench.made() == made
    assert states(second) == {"norm": "cached", "page": "cached"}
    assert second.wheel.path.read_bytes() == first.wheel.path.read_bytes()


def test_another_directory_gives_the_same_bytes(bench: Any) -> None:
    plan = bench.plan("norm", "page", DECODE)
    first = bench.build(plan, jobs=1)
    second = bench.build(plan, cache="another/and deeper", out="elsewhere", jobs=2)
    assert states(second) == dict.fromkeys(("norm", "page", DECODE), "built")
    assert second.wheel.path.read_bytes() == first.wheel.path.read_bytes()
    with zipfile.ZipFile(second.wheel.path) as archive:
        library = archive.read("flashinfer_jit_cache/jit_cache/norm/norm.so")
    assert b"src/flashinfer/data/csrc/norm.h" in library  # __FILE__, relative
    assert os.fsencode(bench.root) not in library


def test_the_statement_tells_source_plan_toolchain_and_modules(bench: Any) -> None:
    plan = bench.plan("page")
    report = bench.build(plan)
    content = json.loads(report.statement.read_text())
    assert content["subject"] == [
        {"name": report.wheel.path.name, "digest": {"sha256": sha256_file(report.wheel.path)}}
    ]
    definition = content["predicate"]["buildDefinition"]
    assert definition["internalParameters"]["planDigest"]["sha256"] == plan.digest
    assert definition["resolvedDependencies"][0]["digest"]["sha256"] == plan.source.sha256
    assert definition["resolvedDependencies"][1]["annotations"]["nvcc"] == "13.0.88"
    [page] = content["predicate"]["runDetails"]["byproducts"]
    with zipfile.ZipFile(report.wheel.path) as archive:
        (bench.root / "page.so").write_bytes(archive.read(page["name"]))
    assert sha256_file(bench.root / "page.so") == page["digest"]["sha256"]


def test_a_failed_module_fails_alone(bench: Any) -> None:
    plan = bench.plan("rope", "norm", "page")
    with pytest.raises(HeaderMissing, match=r"curand_absent\.h") as caught:
        bench.build(plan)
    assert caught.value.data["module"] == "rope"
    assert "curand" in caught.value.remedy
    assert any("curand_absent.h" in line for line in caught.value.data["tail"])
    assert not (bench.root / "out").exists()
    made = bench.made()
    bench.build(bench.plan("norm", "page"))
    assert bench.made() == made  # both were kept


def test_several_failures_are_told_together(bench: Any) -> None:
    with pytest.raises(ModulesFailed) as caught:
        bench.build(bench.plan("rope", "sampling", "page"))
    slugs = {one["module"]: one["type"].rpartition(":")[2] for one in caught.value.data["problems"]}
    assert slugs == {"rope": HeaderMissing.slug, "sampling": CompileFailed.slug}


def test_memory_limit(bench: Any) -> None:
    plan = bench.plan("cascade", "page", limits="memory_gib = 0.125")
    with pytest.raises(CompilerOutOfMemory, match="cascade") as caught:
        bench.build(plan)
    assert caught.value.expected == "at most 0.125 GiB"


def test_time_limit(bench: Any) -> None:
    (bench.cuda / "hold-page.o").touch()
    with pytest.raises(CompileTimeout, match="page"):
        bench.build(bench.plan("page", limits="minutes = 0.02"))


def test_what_the_source_refuses_is_told_before_anything_is_compiled(bench: Any) -> None:
    with pytest.raises(SmUnsupported, match="topk has no code for sm90a") as caught:
        bench.build(bench.plan("page", "topk"))
    assert caught.value.expected == "an SM of major version 10, 11"
    with pytest.raises(SmUnsupported, match="compiled for sm80 whatever"):
        bench.build(bench.plan("page", "gdn_prefill_sm90"))
    with pytest.raises(ModuleUriUnknown, match="has no module silu_and_mul"):
        bench.build(bench.plan("page", "silu_and_mul"))
    with pytest.raises(SmUnsupported, match="cannot compile for sm121"):
        bench.build(bench.plan("page", sm="sm121"))
    assert bench.made() == []


def test_a_source_with_other_bytes_is_refused(bench: Any) -> None:
    plan = bench.plan("page")
    bench.wheel.write_bytes(bench.wheel.read_bytes()[:-1] + b"!")
    with pytest.raises(SourceMismatch):
        bench.build(plan)
    assert bench.made() == []


def test_a_source_tree_that_was_tampered_with_is_made_anew(bench: Any) -> None:
    plan = bench.plan("page")
    bench.build(plan)
    [tree] = (bench.root / "cache" / "sources").iterdir()
    page = tree / "flashinfer/data/csrc/page.cc"
    page.chmod(0o644)
    page.write_text("#error tampered with\n")
    bench.build(bench.plan("norm"))
    assert "tampered" not in page.read_text()


def test_a_damaged_module_in_the_cache_is_compiled_again(bench: Any) -> None:
    plan = bench.plan("page")
    first = bench.build(plan)
    [module] = (bench.root / "cache" / "modules").iterdir()
    (module / "module.so").chmod(0o644)
    (module / "module.so").write_bytes(b"torn")
    second = bench.build(plan, out="again")
    assert states(second) == {"page": "built"}
    assert second.wheel.sha256 == first.wheel.sha256


def test_a_dry_run_compiles_and_writes_nothing(bench: Any) -> None:
    report = bench.build(bench.plan("page", "norm"), dry_run=True)
    assert states(report) == {"page": "planned", "norm": "planned"}
    assert report.wheel is None
    assert bench.made() == []
    assert not (bench.root / "out").exists()


def test_modules_are_chosen_by_uri_or_family(bench: Any) -> None:
    plan = bench.plan("norm", "page", DECODE)
    report = bench.build(plan, modules=["page", "single_decode"])
    assert set(states(report)) == {"page", DECODE}
    assert "+cu130.bench.part" in report.wheel.path.name
    with pytest.raises(ModuleUriUnknown) as caught:
        bench.build(plan, modules=["nrom"])
    assert caught.value.data["nearest"][0] == "norm"


def test_parts_built_apart_make_the_whole(bench: Any) -> None:
    plan = bench.plan("norm", "page", DECODE)
    whole = bench.build(plan)
    parts = [
        bench.build(plan, cache="here", out="here-out", modules=["norm"]),
        bench.build(plan, cache="there", out="there-out", modules=["page", DECODE]),
    ]
    made = bench.made()
    merged = bench.build(
        plan, cache="third", out="third-out", merge=[part.wheel.path for part in parts], source=bench.wheel
    )
    assert bench.made() == made
    assert set(states(merged).values()) == {"merged"}
    assert merged.wheel.path.read_bytes() == whole.wheel.path.read_bytes()


def test_what_cannot_be_merged(bench: Any) -> None:
    part = bench.build(bench.plan("norm")).wheel.path
    statement = part.with_name(part.name + ".intoto.json")
    text = statement.read_text()
    with pytest.raises(MergeRefused, match="no such wheel"):
        bench.build(bench.plan("norm"), merge=[bench.root / "absent.whl"])
    for change, why in (
        (("9.9.9", "9.9.8"), "another source"),
        (("cu130", "cu129"), "another cuda"),
        ((sha256_file(part), "0" * 64), "another wheel"),
    ):
        statement.write_text(text.replace(*change))
        with pytest.raises(MergeRefused, match=why):
            bench.build(bench.plan("norm"), merge=[part])
    statement.unlink()
    with pytest.raises(MergeRefused, match="no statement"):
        bench.build(bench.plan("norm"), merge=[part])


def test_other_sms_are_another_build(bench: Any) -> None:
    plan = bench.plan("page")
    first = bench.build(plan)
    second = bench.build(plan, sms=[Sm.parse("sm80")], out="again")
    assert states(second) == {"page": "built"}
    assert second.wheel.path.name != first.wheel.path.name


def command(bench: Any, plan: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "kernel_depot.cli.main", "build", str(plan), "--jobs", "1"),
        *("--cache", str(bench.root / "cache"), "--out", str(bench.root / "out")),
        *("--cuda-home", str(bench.cuda), "--source", str(bench.wheel), *more),
    ]


def of(directory: Path) -> list[psutil.Process]:
    """The processes that work in a directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(directory):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_build_that_was_ended_goes_on_where_it_was(bench: Any, sent: signal.Signals) -> None:
    plan = bench.root / "plan.toml"
    plan.write_text(bench.text("norm", "page"))
    hold = bench.cuda / "hold-norm_binding.o"
    hold.touch()
    process = subprocess.Popen(
        command(bench, plan), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    work = bench.root / "cache" / "work"
    deadline = time.monotonic() + 60
    # norm's first file is done when its object is there and its second waits
    while not list(work.glob("*/out/norm.o")) or not list(work.glob("*/.ninja_log")):
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(sent)
    process.communicate(timeout=30)
    assert process.returncode != 0
    while of(work):  # what it started ends by itself
        assert time.monotonic() < deadline + 30
        time.sleep(0.05)
    assert not (bench.root / "out").exists()
    assert not list((bench.root / "cache").glob("modules/*/norm.so"))
    hold.unlink()
    before = bench.made()
    assert before.count("norm.o") == 1
    done = subprocess.run(command(bench, plan, "--json"), capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert {one["module"]: one["state"] for one in report["modules"]} == {"norm": "built", "page": "built"}
    assert bench.made().count("norm.o") == 1  # ninja went on with the second file
    assert Path(report["wheel"]["path"]).is_file()
    assert [entry.name for entry in work.iterdir()] == []


def test_the_command_says_what_it_does(bench: Any) -> None:
    plan = bench.root / "plan.toml"
    plan.write_text(bench.text("page", "rope"))
    failed = subprocess.run(command(bench, plan, "--json"), capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["type"] == "urn:kernel-depot:problem:build-header-missing"
    plan.write_text(bench.text("page"))
    done = subprocess.run(command(bench, plan), capture_output=True, text=True, check=True)
    assert done.stdout.startswith("cached    page (sm90a, 1 files, ")
    doctor = subprocess.run(
        command(bench, plan, "--doctor", "--json"), capture_output=True, text=True, check=True
    )
    checks = {check["check"]: check for check in json.loads(doctor.stdout)}
    assert checks["CUDA"] == {"check": "CUDA", "ok": True, "detail": f"the system's, {bench.cuda}"}
    assert all(check["ok"] for check in checks.values())


def test_pip_installs_the_wheel_and_both_questions_are_answered(bench: Any, tmp_path: Path) -> None:
    report = bench.build(bench.plan("norm", "page"))
    target = tmp_path / "site"
    uv = shutil.which("uv", path=Path(sys.executable).parent) or "uv"
    subprocess.run(
        [uv, "pip", "install", "--offline", "--no-deps", "--target", target, report.wheel.path],
        check=True,
        capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "VIRTUAL_ENV": sys.prefix},
    )
    code = (
        "import json, flashinfer_jit_cache as c, importlib.metadata as m\n"
        "[p] = c.get_jit_cache_providers()\n"
        "installed = m.version('flashinfer-jit-cache')\n"
        "print(json.dumps([c.__version__, installed, c.get_jit_cache_dir(), vars(p)]))"
    )
    said = subprocess.run(
        [sys.executable, "-B", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(target)},
    )
    version, installed, directory, provider = json.loads(said.stdout)
    assert version == installed == "9.9.9+cu130.bench"
    assert (Path(directory) / "norm/norm.so").is_file()
    assert SimpleNamespace(**provider) == SimpleNamespace(
        provider_id="bench-sm90a",
        distribution="flashinfer-jit-cache",
        version=version,
        jit_cache_dir=directory,
        cuda_architectures=["sm90a"],
        modules=["norm", "page"],
    )


def test_states_are_told_as_they_change(bench: Any) -> None:
    report = bench.build(bench.plan("page"))
    assert report.modules[0].state is State.BUILT
    assert report.modules[0].to_json()["peak_memory"] >= 0
