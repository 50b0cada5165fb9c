"""`pins check` finds every problem and says where it stands."""

from pathlib import Path

import pytest

from kernel_depot.pins.check import check
from kernel_depot.pins.problem import Severity

SHA = "48ad3df2224f1b0943344895c6cba2f3f0a53bc67ddafdd3e9d7a34f56100aa9"
OTHER = "ff65bf8a96dbbd2725937ff1502e52571e7a90d81d355a21a303328dd06449cc"
WHEEL = "apache_tvm_ffi-0.1.6-cp310-cp310-manylinux_2_28_x86_64.whl"
GOOD = f"""\
[apache_tvm_ffi.cu130.x86_64]
filename = "{WHEEL}"
sha256 = "{SHA}"
index = "pypi"
"""


def findings(tmp_path: Path, text: str, *, allow_file_urls: bool = False) -> list[tuple[str, int | None]]:
    path = tmp_path / "set.toml"
    path.write_text(text)
    return [(item.code, item.line) for item in check([path], allow_file_urls=allow_file_urls)]


def test_a_good_set_has_no_findings(tmp_path: Path) -> None:
    assert findings(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (f'sha256 = "{SHA}"', 'sha256 = "ABC"', ("bad-hex", 3)),
        (f'sha256 = "{SHA}"', f'sha256 = "{SHA.upper()}"', ("bad-hex", 3)),
        (f'sha256 = "{SHA}"\n', "", ("missing-key", 1)),
        ('index = "pypi"', 'index = "pypi"\nsha512 = "00"', ("unknown-key", 5)),
        ('index = "pypi"', 'index = "pypi"\nsize = -1', ("bad-size", 5)),
        ('index = "pypi"', 'index = "pypi"\nsize = true', ("bad-size", 5)),
        ('index = "pypi"', 'index = "pypi"\nsm = "hopper"', ("bad-sm", 5)),
        ('index = "pypi"', 'index = "pypi"\nrecord_sha256 = "1"', ("bad-hex", 5)),
        ('index = "pypi"', 'index = "https://index/"', ("bad-index", 4)),
        ('index = "pypi"', f'index = "pypi"\nurl = "https://host/{WHEEL}"', ("origin-both", 4)),
        ('index = "pypi"', 'index = "pypi"\nstore = true', ("origin-both", 5)),
        ('index = "pypi"', "store = false", ("bad-store", 4)),
        ('index = "pypi"\n', "", ("origin-none", 1)),
        ('index = "pypi"', f'url = "http://host/{WHEEL}"', ("url-not-https", 4)),
        ('index = "pypi"', f'url = "file:///tmp/{WHEEL}"', ("url-not-https", 4)),
        ('index = "pypi"', 'url = "https://host/other.whl"', ("url-filename-mismatch", 4)),
        ('index = "pypi"', f'url = "https://user:secret@host/{WHEEL}"', ("url-credentials", 4)),
        ('index = "pypi"', f'url = "https:///{WHEEL}"', ("bad-url", 4)),
        (f'filename = "{WHEEL}"', 'filename = "tvm.zip"', ("not-a-wheel-name", 2)),
        (f'filename = "{WHEEL}"', 'filename = "../tvm-1-py3-none-any.whl"', ("not-a-wheel-name", 2)),
        (f'filename = "{WHEEL}"', 'filename = "torch-1-py3-none-any.whl"', ("project-mismatch", 2)),
        (f'filename = "{WHEEL}"', f'filename = "{WHEEL.replace("x86_64", "aarch64")}"', ("arch-mismatch", 2)),
        (
            f'filename = "{WHEEL}"',
            f'filename = "{WHEEL.replace("0.1.6", "0.1.6+cu129")}"',
            ("version-mismatch", 2),
        ),
        (
            f'filename = "{WHEEL}"',
            f'filename = "{WHEEL.replace("0.1.6", "0.1.6+cu131")}"',
            ("version-mismatch", 2),
        ),
        (f'filename = "{WHEEL}"', "filename = 7", ("wrong-type", 2)),
        ("[apache_tvm_ffi.cu130.x86_64]", "[apache_tvm_ffi.cuda-thirteen.x86_64]", ("bad-cuda", 1)),
        ("[apache_tvm_ffi.cu130.x86_64]", "[apache_tvm_ffi.cu130.riscv64]", ("bad-arch", 1)),
        ("[apache_tvm_ffi.cu130.x86_64]", "[apache_tvm_ffi]", ("not-a-table", 2)),
    ],
)
def test_each_fault_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, expected: tuple[str, int | None]
) -> None:
    assert old in GOOD
    assert expected in findings(tmp_path, GOOD.replace(old, new))


def test_every_fault_of_a_file_is_reported_at_once(tmp_path: Path) -> None:
    text = GOOD.replace(SHA, "no").replace('index = "pypi"', 'colour = "red"') + (
        f'[other.cu130.aarch64]\nfilename = "other.whl"\nsha256 = "{SHA}"\nurl = "ftp://x"\n'
    )
    assert {code for code, _ in findings(tmp_path, text)} == {
        "bad-hex",
        "unknown-key",
        "origin-none",
        "not-a-wheel-name",
        "url-not-https",
        "platform-gap",
    }


def test_a_file_url_is_accepted_only_when_allowed(tmp_path: Path) -> None:
    text = GOOD.replace('index = "pypi"', f'url = "file:///srv/{WHEEL}"')
    assert findings(tmp_path, text, allow_file_urls=True) == []
    relative = GOOD.replace('index = "pypi"', f'url = "file:{WHEEL}"')
    assert ("bad-url", 4) in findings(tmp_path, relative, allow_file_urls=True)


def test_one_file_name_with_two_hashes_is_a_conflict(tmp_path: Path) -> None:
    second = GOOD.replace("cu130", "cu131").replace(SHA, OTHER)
    assert ("hash-conflict", 5) in findings(tmp_path, GOOD + second)


def test_a_conflict_between_two_files_is_found(tmp_path: Path) -> None:
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text(GOOD)
    two.write_text(GOOD.replace(SHA, OTHER))
    (problem,) = check([one, two])
    assert (problem.code, problem.file, problem.line) == ("hash-conflict", str(two), 1)
    assert f"in {one} line 1" in problem.message


def test_a_file_with_another_error_still_takes_part_in_the_comparison(tmp_path: Path) -> None:
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text(GOOD)
    two.write_text(GOOD.replace(SHA, OTHER) + 'colour = "red"\n')
    assert [item.code for item in check([one, two])] == ["unknown-key", "hash-conflict"]


def test_a_conflict_within_a_file_is_said_once(tmp_path: Path) -> None:
    second = GOOD.replace("cu130", "cu131").replace(SHA, OTHER)
    assert findings(tmp_path, GOOD + second).count(("hash-conflict", 5)) == 1


def test_a_platform_that_lacks_a_project_is_a_gap(tmp_path: Path) -> None:
    other = GOOD.replace("apache_tvm_ffi", "other").replace("cu130", "cu131")
    codes = findings(tmp_path, GOOD + other)
    assert codes.count(("platform-gap", 1)) == 1
    assert codes.count(("platform-gap", 5)) == 1


def test_two_pins_for_one_platform_are_refused_but_providers_may_stand_beside(tmp_path: Path) -> None:
    def body(extra: str) -> str:
        return "[[apache_tvm_ffi.cu130.x86_64]]\n" + GOOD.split("\n", 1)[1] + extra

    assert findings(tmp_path, body("") + body('sm = "sm90a"\n') + body('sm = "10.0a"\n')) == []
    assert ("duplicate-pin", 5) in findings(tmp_path, body("") + body(""))


def test_mixed_versions_of_one_project_are_refused(tmp_path: Path) -> None:
    second = GOOD.replace("cu130", "cu131").replace("0.1.6", "0.1.7").replace(SHA, OTHER)
    assert ("mixed-versions", 5) in findings(tmp_path, GOOD + second)


def test_syntax_errors_have_a_line(tmp_path: Path) -> None:
    assert findings(tmp_path, GOOD + "= 1\n") == [("toml-syntax", 5)]
    assert findings(tmp_path, GOOD + GOOD)[0][0] == "toml-syntax"


def test_an_empty_set_and_an_unreadable_file_are_findings(tmp_path: Path) -> None:
    assert findings(tmp_path, "# nothing\n") == [("empty", None)]
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert [item.code for item in check([tmp_path / "absent.toml", binary])] == ["unreadable", "unreadable"]


def test_a_runtime_outside_the_declared_range_is_a_warning(tmp_path: Path) -> None:
    jit = "flashinfer_jit_cache-0.6.3+cu130-cp39-abi3-manylinux_2_28_x86_64.whl"
    text = GOOD.replace("0.1.6", "0.1.3") + GOOD.replace("apache_tvm_ffi.", "flashinfer_jit_cache.").replace(
        WHEEL, jit
    ).replace(SHA, OTHER)
    path = tmp_path / "set.toml"
    path.write_text(text)
    (problem,) = check([path])
    assert (problem.code, problem.severity) == ("tvm-ffi-range", Severity.WARNING)


def test_the_shipped_pin_sets_have_no_errors() -> None:
    from kernel_depot.shipped import shipped_dir

    paths = sorted(shipped_dir("pins").glob("*.toml"))
    assert [path.name for path in paths] == [
        "flashinfer-0.6.3.toml",
        "flashinfer-cubin-0.6.3.toml",
        "flashinfer-moe-headers-0.6.3.toml",
    ]
    assert [item for item in check(paths) if item.severity is Severity.ERROR] == []
