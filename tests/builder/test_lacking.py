from __future__ import annotations

from kernel_depot.builder.lacking import lacking_plan
from kernel_depot.builder.plan import parse_plan
from kernel_depot.platform import CudaTag, Sm

HEAD = """name = "mine"
cuda = "cu130"
sm = ["sm90a"]
[source]
project = "flashinfer-python"
version = "0.6.5"
filename = "flashinfer_python-0.6.5-py3-none-any.whl"
sha256 = "0fe2de934a4b3690c543dafb03f38d7bb4a762431abe8ae4f7292d6fef10c65d"
index = "pypi"
"""


def test_each_shipped_source_makes_a_whole_plan() -> None:
    for version in ("0.6.3", "0.7.4"):
        text = lacking_plan(["page", "norm"], version=version, cuda=CudaTag(13, 0), sm=Sm.parse("sm90a"))
        plan = parse_plan(text, where="plan")
        assert [request.uri for request in plan.requests] == ["page", "norm"]
        assert plan.source.version == version


def test_without_a_pinned_source_it_is_the_tail_of_one() -> None:
    text = lacking_plan(["page"], version="0.6.5", cuda=CudaTag(13, 0), sm=Sm.parse("sm90a"))
    assert "0.6.5" in text
    assert [request.uri for request in parse_plan(HEAD + text, where="plan").requests] == ["page"]


def test_what_no_plan_can_say_is_a_comment() -> None:
    text = lacking_plan(['x"\n[evil]'], version="0.6.3", cuda=CudaTag(13, 0), sm=Sm.parse("sm90a"))
    assert all(not line or line.startswith("#") for line in text.splitlines())
