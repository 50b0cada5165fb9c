"""Build plans: what is read, and what is refused with every error named."""

from pathlib import Path

import pytest

from kernel_depot.builder.errors import PlanInvalid, PlanUnreadable
from kernel_depot.builder.plan import Plan, find_plan, parse_plan, read_plan
from kernel_depot.pins.pin import IndexOrigin
from kernel_depot.platform import CudaTag, Sm
from kernel_depot.shipped import shipped_dir

SHIPPED = sorted(shipped_dir("builds").glob("*.toml"))

SOURCE = """
[source]
project = "flashinfer-python"
version = "0.6.3"
filename = "flashinfer_python-0.6.3-py3-none-any.whl"
sha256 = "0fe2de934a4b3690c543dafb03f38d7bb4a762431abe8ae4f7292d6fef10c65d"
index = "pypi"
"""


def plan(
    modules: str, *, head: str = 'name = "p"\ncuda = "cu130"\nsm = ["sm90a"]\n', source: str = SOURCE
) -> Plan:
    return parse_plan(head + source + modules, where="p.toml")


def problems(modules: str, **parts: str) -> list[str]:
    with pytest.raises(PlanInvalid) as caught:
        plan(modules, **parts)
    found: list[str] = caught.value.data["problems"]
    return found


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_plans_are_read(path: Path) -> None:
    found = read_plan(path)
    assert found.sms == (Sm.parse("sm90a"),)
    assert found.cuda == CudaTag(13, 0)
    assert found.source.origin == IndexOrigin("pypi")
    assert find_plan(path.stem) == find_plan(path.name) == path


def test_the_sm90_plan_has_every_family_of_flashinfer_rs() -> None:
    found = read_plan(find_plan("flashinfer-0.6.3-sm90"))
    assert {request.family for request in found.requests} == {
        "norm", "page", "single_prefill", "batch_prefill", "single_decode", "batch_decode",
        "gdn_prefill_sm90", "batch_mla", "fused_moe_90",
    }  # fmt: skip
    prefill = [dict(one.parameters) for one in found.requests if one.family == "batch_prefill"]
    assert {(one["dtype_q"], one["head_dim_qk"]) for one in prefill} == {
        ("f16", 128),
        ("bf16", 128),
        ("bf16", 256),
    }


def test_comments_and_limits_leave_the_digest_and_what_is_built_does_not() -> None:
    page = '[[module]]\nuri = "page"\n'
    first = plan(page)
    assert plan(f"# a comment\n[limits]\nminutes = 7.5\n{page}").digest == first.digest
    assert plan('[[module]]\nuri = "norm"\n').digest != first.digest
    assert first.narrowed(sms=[Sm.parse("sm80")]).digest != first.digest
    assert first.narrowed(sms=[]) is first


def test_every_error_is_named_at_once() -> None:
    found = problems(
        '[[module]]\nuri = "nrom"\n'
        '[[module]]\nfamily = "single_decode"\nhead_dims = 128\n'
        '[[module]]\nfamily = "batch_decode"\ndtype = "float16"\n'
        '[[module]]\nfamily = "single_prefill"\nhead_dim = "128"\n'
        '[[module]]\nfamily = "batch_mla"\nbackend = "fa4"\n'
        '[[module]]\nuri = "page"\nhead_dim = 64\n'
        "[[module]]\n"
        '[[module]]\nuri = "x"\ngenerator = "os.system"\n'
    )
    assert len(found) == 8
    assert found[0] == "module 1: no kernel module is called 'nrom'; nearest: " + found[0].rpartition(": ")[2]
    assert "norm" in found[0].rpartition("nearest: ")[2].split(", ")
    assert "has no parameter 'head_dims'" in found[1]
    assert "expected f16, bf16, " in found[2]
    assert "expected a number, found 128" in found[3]
    assert "expected fa2 or fa3, found fa4" in found[4]
    assert "has no parameters" in found[5]
    assert "give `uri`, or `family`" in found[6]
    assert "not a function of the source's generator" in found[7]


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ('name = "P!"\ncuda = "cu130"\nsm = ["sm90a"]\n', "name: "),
        ('name = "p"\ncuda = "cu130"\nsm = []\n', "sm: "),
        ('name = "p"\ncuda = "cu130"\nsm = ["sm90a"]\nmodles = 1\n', "modles: "),
        ('name = "p"\ncuda = "cu130"\nsm = ["hopper"]\n', "sm: 'hopper' is not an SM"),
        ('name = "p"\ncuda = "twelve"\nsm = ["sm90a"]\n', "cuda: 'twelve' is not a CUDA version"),
        ('name = "p"\ncuda = "cu130"\nsm = ["sm90a"]\nneeds = ["cudnn"]\n', "needs.0: "),
    ],
)
def test_a_bad_head_is_refused(head: str, problem: str) -> None:
    assert problems('[[module]]\nuri = "page"\n', head=head)[0].startswith(problem)


def test_a_bad_source_is_refused() -> None:
    page = '[[module]]\nuri = "page"\n'
    both = SOURCE + 'url = "https://example.org/x.whl"\n'
    assert problems(page, source=both) == ["source: give either `index` or `url`"]
    other = SOURCE.replace("flashinfer_python-0.6.3", "flashinfer_python-0.6.4")
    assert problems(page, source=other)[0].startswith("source.filename: ")
    short = SOURCE.replace("0fe2de", "")
    assert problems(page, source=short)[0].startswith("source.sha256: ")


def test_a_module_of_no_known_family() -> None:
    found = plan('[[module]]\nuri = "vllm_comm"\ngenerator = "comm.gen_vllm_comm_module"\n')
    [request] = found.requests
    assert (request.uri, request.call.module, request.call.function) == (
        "vllm_comm", "comm", "gen_vllm_comm_module",
    )  # fmt: skip


def test_what_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanUnreadable, match="no such build plan") as caught:
        find_plan("smal")
    assert "small" in caught.value.expected
    with pytest.raises(PlanUnreadable, match="no TOML"):
        parse_plan("name = ", where="x")
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanUnreadable, match="cannot be read"):
        read_plan(tmp_path / "x.toml")
