"""Every table and key of any TOML text has its line."""

from typing import Any

import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.pins.positions import line_of, positions

TEXT = """\
# a comment with = and [brackets]

[one.cu130."x86_64"] # after
filename = "a = b"
notes = \"\"\"
[not.a.table]
x = 1
\"\"\"
dotted."key part".deep = 1
inline = { url = "u", nested = { k = 1 } }
list = [
  1, # one
  { in = 2 },
]

[[many.tables]]
x = 1
[many.tables.sub]
y = 2
[[many.tables]]
x = 3
"""


def test_lines_of_every_form_of_key_and_table() -> None:
    lines = positions(TEXT)
    assert lines[("one", "cu130", "x86_64")] == 3
    assert lines[("one", "cu130", "x86_64", "filename")] == 4
    assert lines[("one", "cu130", "x86_64", "notes")] == 5
    assert lines[("one", "cu130", "x86_64", "dotted", "key part", "deep")] == 9
    assert lines[("one", "cu130", "x86_64", "inline", "nested", "k")] == 10
    assert lines[("one", "cu130", "x86_64", "list", 1, "in")] == 11
    assert lines[("many", "tables", 0)] == 16
    assert lines[("many", "tables", 0, "x")] == 17
    assert lines[("many", "tables", 0, "sub", "y")] == 19
    assert lines[("many", "tables", 1, "x")] == 21
    assert ("not", "a", "table") not in lines


def test_what_has_no_line_of_its_own_gets_the_nearest_around_it() -> None:
    lines = positions(TEXT)
    assert line_of(lines, ("one", "cu130", "x86_64", "absent")) == 3
    assert line_of(lines, ("one",)) == 3
    assert line_of(lines, ("absent",)) is None


KEYS = st.text(alphabet="ab-_ .=\"'[]#é", min_size=1, max_size=6)
SCALARS = st.one_of(
    st.integers(-5, 5),
    st.booleans(),
    st.text(alphabet="x=[]#\n\"' ", max_size=8),
    st.lists(st.integers(0, 3)),
)
DOCUMENTS = st.dictionaries(
    KEYS, st.dictionaries(KEYS, st.dictionaries(KEYS, SCALARS, max_size=3), max_size=3), max_size=3
)


@given(DOCUMENTS)
def test_every_leaf_has_a_line_on_which_its_key_stands(document: dict[str, Any]) -> None:
    text = tomlkit.dumps(document)
    lines = positions(text)
    source = text.split("\n")
    for outer, tables in document.items():
        for middle, table in tables.items():
            for key, value in table.items():
                rest = source[lines[(outer, middle, key)] - 1 :]
                statements = ("\n".join(rest[:end]) for end in range(1, len(rest) + 1))
                assert next(found for text in statements if (found := _try(text)) is not None) == {key: value}


def _try(statement: str) -> dict[str, Any] | None:
    try:
        return tomlkit.parse(statement).unwrap()
    except Exception:
        return None
