"""What the documents tell people to run exists."""

import re
import shlex
from pathlib import Path

import pytest

from kernel_depot.cli.main import COMMANDS, load
from kernel_depot.settings import Settings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docker" / "README.md"]


def command_lines() -> list[tuple[str, str]]:
    """Every `kernel-depot …` in a code block or between backticks, with its page."""
    found = []
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        blocks += re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
        lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"`(kernel-depot [^`\n]+)`", text)
        for line in lines:
            for part in re.findall(r"(?:^|[\s(/])(kernel-depot [^|&;()\"#]*)", line):
                found.append((page.name, part.strip().split("  ")[0]))
    return found


def check(words: list[str]) -> None:
    """Follow the words of a command line through the commands' own parameters."""
    assert words[0] in COMMANDS, f"no command {words[0]}"
    command = load(words[0])
    rest = words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"no command {' '.join(words)}"
        command, rest = command.commands[rest[0]], rest[1:]
    options = {name for parameter in command.params for name in parameter.opts + parameter.secondary_opts}
    for word in rest:
        if word.startswith("--"):
            assert word.split("=")[0] in options | {"--help"}, f"{' '.join(words)}: no option {word}"


@pytest.mark.parametrize(("page", "line"), sorted(set(command_lines())))
def test_a_command_that_a_page_names_exists_with_its_options(page: str, line: str) -> None:
    words = [word for word in shlex.split(line.replace("'", "")) if word not in ("…", "...", "[", "]")]
    if len(words) < 2 or words[1].startswith("-"):
        return
    own = words[: words.index("--")] if "--" in words else words  # behind it, another program's
    check([word.strip("[]") for word in own[1:]])


def test_the_pages_name_commands_at_all() -> None:
    named = {line.split()[1] for _, line in command_lines() if len(line.split()) > 1}
    assert {"demo", "serve", "materialize", "sync", "pins", "smoke", "doctor", "env", "tokens"} <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_page_is_linked_from_the_index() -> None:
    linked = set(re.findall(r"\]\(([a-z]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    for name, field in Settings.model_fields.items():
        assert f"`KERNEL_DEPOT_{name.upper()}" in text, name
        assert field.description, f"{name} has no description"
        assert field.description in text, f"docs/settings.md is behind for {name}; run docs/generate.py"


def test_the_readme_has_the_line_that_ci_runs() -> None:
    text = (ROOT / "README.md").read_text()
    line = text.split("<!-- test line -->\n```sh\n")[1].split("\n")[0]
    assert line.startswith("python3 -m venv .venv && .venv/bin/pip install")
    assert "pytest" in line
    assert (ROOT / ".ci" / "run").read_text().count("<!-- test line -->") == 1
