"""Revisions, plans, canaries and the matrix in the catalog alone, on both databases."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, update

from kernel_depot.catalog import changes, queries, record, tables
from kernel_depot.catalog.bundles import PinSetUnknown, RevisionUnknown
from kernel_depot.catalog.database import open_database, reading, upgrade, writing
from kernel_depot.fleet import canaries, nodes, planning, revisions
from kernel_depot.fleet.desired import look, wanted_of
from kernel_depot.fleet.errors import CanaryImpossible, RevisionMoved, RevisionNotReady, RollbackImpossible
from kernel_depot.fleet.matrix import matrix
from kernel_depot.fleet.nodes import ModuleOutcome, NodeState, Registration, StateReport
from kernel_depot.fleet.revisions import CanaryOrder
from kernel_depot.pins.document import parse_pin_set
from kernel_depot.platform import Arch, CudaTag, Platform, Sm

ORDER = CanaryOrder("ring", "canary", 2)


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An empty catalog."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/catalog.sqlite"
    else:
        url = request.getfixturevalue("postgres_url")
    made = open_database(url)
    upgrade(made)
    yield made
    made.dispose()


def propose(engine: Engine, version: str, *, wheel: str) -> str:
    """Record a revision of `kernels` whose one wheel has a digest of `wheel`."""
    text = (
        f'[flashinfer_jit_cache.cu130.x86_64]\nfilename = "flashinfer_jit_cache-{version}-py3-none-any.whl"\n'
        f'sha256 = "{wheel * 64}"\nindex = "pypi"\n'
    )
    pin_set = parse_pin_set(text, name="kernels", origin="test")
    with writing(engine) as session:
        record.record_revision(session, pin_set)
    return pin_set.digest


def bring_in(engine: Engine, version: str, *, wheel: str, modules: dict[str, tuple[str, list[str]]]) -> None:
    """Record the wheel: its modules by name, each with a letter for its digest and its SMs."""
    with writing(engine) as session:
        session.add(
            tables.Wheel(
                sha256=wheel * 64,
                filename=f"flashinfer_jit_cache-{version}-py3-none-any.whl",
                project="flashinfer_jit_cache",
                version=version,
                arch=None,
                size=1000,
                unpacked_size=1000,
                member_count=len(modules),
                kept=False,
                ingested_at=record.now(),
            )
        )
        session.flush()
        for name, (letter, sms) in modules.items():
            sha256 = letter * 64
            session.merge(tables.Blob(sha256=sha256, size=100, zstd_state="pending"))
            session.merge(
                tables.Inspection(
                    sha256=sha256, format="elf", machine="x86_64", needed=[], functions=[], sms=sms, ptx=[]
                )
            )
            session.add(
                tables.Member(
                    wheel=wheel * 64,
                    path=f"flashinfer_jit_cache/jit_cache/{name}/{name}.so",
                    sha256=sha256,
                    size=100,
                    kind="module",
                    module=name,
                )
            )
        changes.touch_fleet(session)


def register(
    engine: Engine, name: str, *, ring: str = "rest", sm: str | None = None, driver: str = "580"
) -> None:
    platform = Platform(CudaTag(13, 0), Arch.parse("x86_64"), Sm.parse(sm) if sm else None)
    with writing(engine) as session:
        said = Registration(
            platform=platform,
            labels={"ring": ring},
            gpus=[],
            driver=driver,
            glibc=None,
            capacity_bytes=None,
            product="0",
        )
        nodes.register(session, name, said, who="test")


def activate(engine: Engine, revision: str, **options: Any) -> bool:
    with writing(engine) as session:
        return revisions.activate(session, "kernels", revision, who="ada", why="a test", **options)


def begin(engine: Engine, revision: str, **options: Any) -> None:
    with writing(engine) as session:
        revisions.begin_canary(session, "kernels", revision, ORDER, who="ada", why="try", **options)


def states(engine: Engine) -> dict[str, str]:
    with reading(engine) as session:
        rows = queries.revisions(session, "kernels")
        return {digest: str(life) for digest, life in revisions.lives(session, "kernels", rows).items()}


def bundle_of(engine: Engine, name: str) -> str:
    with reading(engine) as session:
        wanted = wanted_of(nodes.known(session, name))
    digest = look(engine).desired(name, wanted).bundle
    assert digest is not None
    return digest


def report(engine: Engine, name: str, outcomes: Sequence[tuple[str, str, str]], *, ready: bool = True) -> str:
    """Let a node smoke its desired bundle and tell its state; return the bundle."""
    bundle = bundle_of(engine, name)
    with writing(engine) as session:
        results = [
            ModuleOutcome(module=module, sha256=letter * 64, outcome=outcome)
            for module, letter, outcome in outcomes
        ]
        nodes.record_smoke(session, name, bundle=bundle, gpu=None, driver="580", results=results)
        state = NodeState.READY if ready else NodeState.FAILED
        nodes.report(session, name, StateReport(state=state, bundle=bundle))
    canaries.judge(engine, look(engine), name)
    return bundle


@pytest.fixture
def two(engine: Engine) -> tuple[str, str]:
    """Two materialized revisions, the first of them active; two canaries and one other node."""
    one = propose(engine, "0.6.3", wheel="1")
    bring_in(engine, "0.6.3", wheel="1", modules={"norm": ("a", ["sm_90a"]), "page": ("b", ["sm_90a"])})
    two = propose(engine, "0.6.4", wheel="2")
    bring_in(
        engine, "0.6.4", wheel="2", modules={"norm": ("c", ["sm_100a"]), "rope": ("d", []), "page": ("b", [])}
    )
    activate(engine, one)
    for name, ring in (("x", "canary"), ("y", "canary"), ("z", "rest")):
        register(engine, name, ring=ring)
        report(engine, name, [("norm", "a", "pass"), ("page", "b", "pass")])
    return one, two


def test_a_revision_lives_from_proposed_to_retired_and_every_step_is_in_the_log(engine: Engine) -> None:
    one = propose(engine, "0.6.3", wheel="1")
    assert states(engine) == {one: "proposed"}
    with pytest.raises(RevisionNotReady):
        activate(engine, one)
    bring_in(engine, "0.6.3", wheel="1", modules={"norm": ("a", [])})
    assert states(engine) == {one: "materialized"}
    with pytest.raises(CanaryImpossible):  # there is nothing to go back to
        begin(engine, one)
    with pytest.raises(PinSetUnknown), writing(engine) as session:
        revisions.rollback(session, "kernels", who="ada", why=None)
    assert activate(engine, one)
    assert not activate(engine, one)
    two = propose(engine, "0.6.4", wheel="2")
    bring_in(engine, "0.6.4", wheel="2", modules={"norm": ("c", [])})
    with pytest.raises(RevisionMoved):
        activate(engine, two, expected=two)
    with pytest.raises(RevisionUnknown):
        activate(engine, "f" * 64)
    with pytest.raises(RollbackImpossible), writing(engine) as session:
        revisions.rollback(session, "kernels", who="ada", why=None)
    begin(engine, two, expected=one)
    assert states(engine) == {one: "active", two: "canary"}
    activate(engine, two)
    assert states(engine) == {one: "retired", two: "active"}
    with writing(engine) as session:
        assert revisions.rollback(session, "kernels", who="bob", why="slower", expected=two) == (two, one)
    assert states(engine) == {one: "active", two: "retired"}
    with reading(engine) as session:
        log = [
            (entry.who, entry.action, entry.before, entry.after, entry.why)
            for entry in changes.audit_page(session, subject="kernels")
        ]
    assert log == [
        ("bob", "rolled-back", two, one, "slower"),
        ("ada", "activated", one, two, "a test"),
        ("ada", "canary-begun", one, two, "try"),
        ("ada", "activated", None, one, "a test"),
    ]


def test_enough_ready_canaries_promote_and_the_others_follow(engine: Engine, two: tuple[str, str]) -> None:
    before = bundle_of(engine, "z")
    begin(engine, two[1])
    assert bundle_of(engine, "z") == before
    fresh = [("norm", "c", "pass"), ("rope", "d", "skipped")]
    after = report(engine, "x", fresh)
    assert after != before
    assert states(engine)[two[1]] == "canary"  # two are asked for
    assert report(engine, "y", fresh) == after
    assert states(engine) == {two[0]: "retired", two[1]: "active"}
    assert bundle_of(engine, "z") == after


def test_one_failure_ends_it_and_only_failures_since_it_began_count(
    engine: Engine, two: tuple[str, str]
) -> None:
    before = bundle_of(engine, "x")
    begin(engine, two[1])
    report(engine, "x", [("norm", "c", "crashed")], ready=False)
    assert states(engine) == {two[0]: "active", two[1]: "failed"}
    with reading(engine) as session:
        problem = revisions.failure(session, two[1])
    assert problem is not None
    assert (problem["node"], problem["module"], problem["sha256"]) == ("x", "norm", "c" * 64)
    assert {bundle_of(engine, name) for name in "xyz"} == {before}
    begin(engine, two[1])  # x is repaired
    report(engine, "y", [("norm", "c", "pass"), ("rope", "d", "pass")])
    assert states(engine)[two[1]] == "canary"
    report(engine, "x", [("norm", "c", "pass"), ("rope", "d", "pass")])
    assert states(engine)[two[1]] == "active"


def test_a_plan_tells_modules_by_digest_bytes_and_modules_without_code(
    engine: Engine, two: tuple[str, str]
) -> None:
    register(engine, "z", sm="sm90a")
    plan = planning.plan(engine, "kernels", two[1])
    assert (plan.before, plan.after) == two
    assert [pin.version for pin in plan.wheels_added] == ["0.6.4"]
    assert [pin.version for pin in plan.wheels_removed] == ["0.6.3"]
    assert [(change.module, change.before, change.after) for change in plan.modules] == [
        ("norm", "a" * 64, "c" * 64),
        ("rope", None, "d" * 64),
    ]
    told = {node.node: (node.bytes, node.without_code, node.complete) for node in plan.nodes}
    assert told == {"x": (200, (), True), "y": (200, (), True), "z": (200, ("norm",), True)}
    back = planning.plan(engine, "kernels", two[0])
    assert (back.modules, {node.bytes for node in back.nodes}) == ((), {0})
    with pytest.raises(RevisionUnknown):
        planning.plan(engine, "others", two[1])


def cells(engine: Engine, module: str | None = None) -> dict[tuple[str, str], tuple[str, str]]:
    with reading(engine) as session:
        listed = nodes.listed(session)
        session.expunge_all()
    desired = {node.name: bundle_of(engine, node.name) for node in listed}
    with reading(engine) as session:
        found = matrix(session, listed, desired, module=module)
    return {(cell.module, cell.node): (cell.state, cell.result.outcome) for cell in found}


def test_the_matrix_is_about_the_bytes_that_nodes_are_to_have(engine: Engine, two: tuple[str, str]) -> None:
    assert set(cells(engine).values()) == {("pass", "pass")}
    assert len(cells(engine)) == 6
    activate(engine, two[1])
    assert cells(engine, "norm") == {("norm", name): ("stale", "pass") for name in "xyz"}
    report(engine, "x", [("norm", "c", "refused"), ("rope", "d", "skipped")], ready=False)
    assert cells(engine)["norm", "x"] == ("fail", "refused")
    assert cells(engine)["rope", "x"] == ("skipped", "skipped")
    assert cells(engine)["page", "x"] == ("pass", "pass")  # the same bytes in both
    with writing(engine) as session:
        revisions.rollback(session, "kernels", who="ada", why=None)
    assert cells(engine)["norm", "x"] == ("pass", "pass")  # smoked before; no new smoke is needed
    assert cells(engine)["rope", "x"] == ("stale", "skipped")
    register(engine, "z", driver="590")
    assert cells(engine)["norm", "z"] == ("stale", "pass")


def test_the_desired_state_is_read_once_for_nodes_of_one_kind(engine: Engine, two: tuple[str, str]) -> None:
    with reading(engine) as session:
        wanted = wanted_of(nodes.known(session, "z"))
    outlook = look(engine)
    first = outlook.desired("z", wanted)
    with writing(engine) as session:
        session.connection().execute(update(tables.PinSet).values(revision=two[1]))
    assert outlook.desired("z2", wanted) is first
    assert json.loads(json.dumps(first.to_json()))["pin_sets"] == [{"name": "kernels", "revision": two[0]}]
