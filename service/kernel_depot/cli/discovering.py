"""What `pins discover` does with files: look for newer pins, show the edit of each, make it when told."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import typer

from kernel_depot.cli.render import print_json
from kernel_depot.pins.candidates import Indexes, IndexPlace
from kernel_depot.pins.discovery import Discovery, discover
from kernel_depot.pins.document import read_pin_set
from kernel_depot.pins.index import DEFAULT_INDEX, IndexUnknown
from kernel_depot.pins.pin import IndexOrigin, Pin
from kernel_depot.settings import load_settings

_STABLE: Final = "https://flashinfer.ai/whl/{cuda}"
_NIGHTLY: Final = "https://flashinfer.ai/whl/nightly/{cuda}"


def discover_files(
    files: Iterable[Path],
    *,
    indexes: Sequence[str],
    projects: Sequence[str],
    nightly: bool,
    pre: bool,
    write: bool,
    as_json: bool,
) -> bool:
    """Look for newer pins of each file and print what was found; return whether any file is stuck.

    A file is stuck when there are newer wheels of which none can be proposed. Raise PinSetInvalid,
    PinSetUnreadable, IndexUnknown, IndexUnreachable.
    """
    known = load_settings().index
    answers = []
    stuck = False
    for file in files:
        pin_set = read_pin_set(file)
        tags = sorted({pin.cuda for pin in pin_set.pins})
        places = index_places(indexes, pin_set.pins, known, nightly=nightly)
        reader = Indexes(places, tags)
        try:
            found = discover(pin_set, reader, projects=projects, pre=pre)
        finally:
            reader.close()
        stuck |= bool(found.why_not) and not found.changes
        if write and found.changes:
            staged = file.with_name(f".{file.name}.new")
            staged.write_text(found.text, encoding="utf-8")
            staged.replace(file)
        answers.append(_answer(file, found))
        if not as_json:
            typer.echo("\n".join(_lines(file, found, written=write)))
    if as_json:
        print_json(answers)
    return stuck


def _answer(file: Path, found: Discovery) -> dict[str, object]:
    changes = [
        {"before": change.before.to_json(), "after": change.after.to_json()} for change in found.changes
    ]
    return {"file": str(file), "changes": changes, "why_not": list(found.why_not), "text": found.text}


def _lines(file: Path, found: Discovery, *, written: bool) -> list[str]:
    texts = found.pin_set.text.splitlines(), found.text.splitlines()
    lines = list(difflib.unified_diff(*texts, str(file), str(file), lineterm=""))
    lines += [f"{file}: not proposed: {reason}" for reason in found.why_not]
    if not found.changes:
        return [*lines, f"{file}: no newer pins to propose"]
    return [*lines, f"{file}: {len(found.changes)} newer pins{', written' if written else ''}"]


def index_places(
    given: Sequence[str], pins: Sequence[Pin], known: Mapping[str, str], *, nightly: bool
) -> list[IndexPlace]:
    """Return the indexes to look at; an address that a name stands for is that name's."""
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    addresses = {DEFAULT_INDEX: PYPI_SIMPLE_ENDPOINT, **known}
    names = {address.rstrip("/"): name for name, address in addresses.items()}
    words = list(given)
    if not words:
        named = {pin.origin.name for pin in pins if isinstance(pin.origin, IndexOrigin)}
        words = [_STABLE, *sorted({DEFAULT_INDEX, *named})]
    if nightly:
        words.append(_NIGHTLY)
    places = []
    for word in words:
        if word in addresses:
            places.append(IndexPlace(addresses[word], word))
        elif word.startswith(("http://", "https://")):
            places.append(IndexPlace(word, names.get(word.rstrip("/"))))
        else:
            raise IndexUnknown(
                f"the package index {word!r} has no address",
                where="--index",
                expected=f"an http address or one of {', '.join(sorted(addresses))}",
                found=word,
                remedy=f"set KERNEL_DEPOT_INDEX_{word.upper()} to its simple-API address",
            )
    return places
