"""Pin sets are read from TOML, JSON and Cargo.toml to the same values."""

import json
from pathlib import Path

import pytest

from kernel_depot.pins.document import parse_pin_set, pin_set_from_json, read_pin_set
from kernel_depot.pins.pin import IndexOrigin, UrlOrigin
from kernel_depot.pins.problem import PinSetInvalid, PinSetUnreadable
from kernel_depot.platform import Arch, CudaTag
from kernel_depot.shipped import shipped_dir

SEED = shipped_dir("pins") / "flashinfer-0.6.3.toml"


def test_the_seed_has_eight_pins_for_two_tags_and_two_archs() -> None:
    pin_set = read_pin_set(SEED)
    assert pin_set.name == "flashinfer-0.6.3"
    assert len(pin_set.pins) == 8
    assert {(str(pin.cuda), str(pin.arch)) for pin in pin_set.pins} == {
        (cuda, arch) for cuda in ("cu130", "cu131") for arch in ("x86_64", "aarch64")
    }
    jit = next(pin for pin in pin_set.pins if pin.project == "flashinfer_jit_cache")
    assert jit.version == "0.6.3+cu130"
    assert isinstance(jit.origin, UrlOrigin)
    tvm = next(pin for pin in pin_set.pins if pin.project == "apache_tvm_ffi")
    assert tvm.origin == IndexOrigin("pypi")
    assert (tvm.cuda, tvm.arch) == (CudaTag(13, 0), Arch.X86_64)


def test_the_digest_ignores_comments_and_order_but_no_fact() -> None:
    text = SEED.read_text()
    tables = text.split("\n[")
    shuffled = "# another comment\n[" + "\n[".join(reversed(tables[1:]))
    one = parse_pin_set(text, name="a", origin="x")
    assert one.digest == parse_pin_set(shuffled, name="a", origin="y").digest
    assert one.digest != parse_pin_set(text, name="b", origin="x").digest
    changed = text.replace('\nindex = "pypi"', '\nindex = "mirror"', 1)
    assert one.digest != parse_pin_set(changed, name="a", origin="x").digest


def test_json_of_the_same_shape_is_the_same_set() -> None:
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    text = SEED.read_text()
    from_json = pin_set_from_json(tomllib.loads(text), name="s", origin="body")
    assert from_json.digest == parse_pin_set(text, name="s", origin="file").digest
    assert pin_set_from_json(json.loads(from_json.text), name="s", origin="again").digest == from_json.digest


@pytest.mark.parametrize("document", [None, [], "text", 3, {}, {"a": 1}, {"a": {"cu130": {"x86_64": []}}}])
def test_json_that_is_no_pin_set_is_refused(document: object) -> None:
    with pytest.raises(PinSetInvalid) as caught:
        pin_set_from_json(document, name="s", origin="body")
    assert caught.value.problems


def test_a_refused_set_carries_every_problem() -> None:
    text = SEED.read_text().replace('sha256 = "', 'sha256 = "x', 2)
    with pytest.raises(PinSetInvalid) as caught:
        parse_pin_set(text, name="s", origin="s.toml")
    assert [problem.code for problem in caught.value.problems].count("bad-hex") == 2
    assert len(caught.value.problem()["problems"]) == len(caught.value.problems)


def test_cargo_toml_with_platform_tables(tmp_path: Path) -> None:
    crate = tmp_path / "my-crate"
    crate.mkdir()
    body = SEED.read_text()
    for project in ("flashinfer_jit_cache", "apache_tvm_ffi"):
        body = body.replace(f"[{project}.", f"[package.metadata.flashinfer_rs.pinned_wheels.{project}.")
    (crate / "Cargo.toml").write_text('[package]\nname = "x"\n' + body)
    pin_set = read_pin_set(crate / "Cargo.toml")
    assert pin_set.name == "my-crate"
    assert set(pin_set.pins) == set(read_pin_set(SEED).pins)


def test_cargo_toml_with_one_flat_table_a_project(tmp_path: Path) -> None:
    seed = read_pin_set(SEED)
    wanted = [pin for pin in seed.pins if str(pin.cuda) == "cu130" and pin.arch is Arch.X86_64]
    text = '[package]\nname = "x"\n'
    for pin in wanted:
        origin = f'url = "{pin.origin}"' if isinstance(pin.origin, UrlOrigin) else 'index = "pypi"'
        text += (
            f"[package.metadata.flashinfer_rs.pinned_wheels.{pin.project}]\n"
            f'filename = "{pin.filename}"\nsha256 = "{pin.sha256}"\n{origin}\n'
        )
    (tmp_path / "Cargo.toml").write_text(text)
    assert set(read_pin_set(tmp_path / "Cargo.toml").pins) == set(wanted)


def test_cargo_toml_problems_have_lines(tmp_path: Path) -> None:
    (tmp_path / "Cargo.toml").write_text(
        "[package]\n\n[package.metadata.flashinfer_rs.pinned_wheels.a.cu130.x86_64]\nsha256 = 'no'\n"
    )
    with pytest.raises(PinSetInvalid) as caught:
        read_pin_set(tmp_path / "Cargo.toml")
    found = {(problem.code, problem.line, problem.table) for problem in caught.value.problems}
    assert ("bad-hex", 4, "a.cu130.x86_64") in found
    (tmp_path / "Cargo.toml").write_text("[package]\nname = 'x'\n")
    with pytest.raises(PinSetInvalid) as caught:
        read_pin_set(tmp_path / "Cargo.toml")
    assert [problem.code for problem in caught.value.problems] == ["no-pins"]


def test_a_missing_file_is_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(PinSetUnreadable, match=r"absent\.toml"):
        read_pin_set(tmp_path / "absent.toml")
