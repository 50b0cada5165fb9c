"""Write docs/problems.md and docs/settings.md from the code: `python docs/generate.py`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections import defaultdict
from pathlib import Path

import kernel_depot
from kernel_depot.errors import PROBLEM_NAMESPACE, DepotError, all_problems
from kernel_depot.settings import Settings

PAGE = Path(__file__).with_name("problems.md")
SETTINGS_PAGE = Path(__file__).with_name("settings.md")
HEAD = f"""\
# Problems

Every failure has a type that never changes for one kind of failure: `{PROBLEM_NAMESPACE}` and one of
the slugs below. The API answers `application/problem+json` (RFC 9457) with that `type`, a `title`, the
HTTP `status`, a `detail` that says what happened this time, and where they are known `where`, `expected`,
`found` and `remedy` (what to do next). The command line prints the same, as text or with `--json`, and
exits 1.

`python docs/generate.py` writes this page from the code; a test compares both.
"""


def rooms() -> dict[str, list[type[DepotError]]]:
    """Import every module and return the kinds of failure, without mere bases, by the room they are of."""
    for module in pkgutil.walk_packages(kernel_depot.__path__, "kernel_depot."):
        importlib.import_module(module.name)
    found: dict[str, list[type[DepotError]]] = defaultdict(list)
    for kind in set(all_problems()):
        if kind.__module__.startswith("kernel_depot.") and "slug" in vars(kind):
            found[kind.__module__.split(".")[1]].append(kind)
    return {room: sorted(found[room], key=lambda kind: kind.slug) for room in sorted(found)}


def page() -> str:
    """Return the text of docs/problems.md."""
    lines = [HEAD]
    for room, kinds in rooms().items():
        lines += [f"## {room}", "", "| slug | status | what it is |", "|---|---|---|"]
        for kind in kinds:
            text = " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())
            lines.append(f"| `{kind.slug}` | {kind.status} | {kind.title}. {text} |")
        lines.append("")
    return "\n".join(lines)


SETTINGS_HEAD = """\
# Settings

The server and `kernel-depot materialize` read these from the environment; a command's own option wins. The
worker takes its own from the options of `kernel-depot sync` and the variables its `--help` names.

`python docs/generate.py` writes this page from the code; a test compares both.

| variable | default | meaning |
|---|---|---|
"""


def settings_page() -> str:
    """Return the text of docs/settings.md."""
    rows = []
    for name, field in Settings.model_fields.items():
        variable = f"KERNEL_DEPOT_{name.upper()}" + ("_<NAME>" if name == "index" else "")
        default = "computed" if field.default_factory is not None else f"`{field.default}`"
        rows.append(f"| `{variable}` | {default} | {field.description} |")
    return SETTINGS_HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    SETTINGS_PAGE.write_text(settings_page())
