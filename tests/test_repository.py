"""The repository speaks of the product alone."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def tracked() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def lines_with(pattern: str) -> list[str]:
    found = []
    for path in tracked():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    return found


def test_no_package_registry_is_named_by_its_host() -> None:
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    host = PYPI_SIMPLE_ENDPOINT.split("/")[2]
    files = "files." + "python" + "hosted.org"
    assert lines_with(rf"{re.escape(host)}|{re.escape(files)}") == []


def test_no_unfinished_work_is_marked() -> None:
    words = "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X:"])
    assert lines_with(rf"\b({words})\b") == []


def test_no_check_is_switched_off() -> None:
    switches = "|".join(["type: " + "ignore", "pragma: no " + "cover", "NotImplemented" + "Error"])
    assert lines_with(rf"({switches})\b") == []


def test_no_path_of_one_machine() -> None:
    home = "/ro" + "ot/"
    assert lines_with(rf"(^|[^A-Za-z0-9_]){home}|/home/[a-z]+/") == []
