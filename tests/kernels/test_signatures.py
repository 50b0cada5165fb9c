"""Signatures as kernels spell them, for every function of every release that is called here."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_depot.kernels.signatures import Sent, ask_signature, kinds, parse_signature

_WORDS = {
    "T": "DLTensor*",
    "M": "Optional<DLTensor*>",
    "O": "Optional<ffi.Tensor>",
    "W": "ffi.Tensor",
    "I": "int",
    "F": "float",
    "B": "bool",
    "A": "Array<int>",
}
_KINDS = {
    "T": Sent.TENSOR,
    "M": Sent.MAYBE,
    "O": Sent.MAYBE,
    "W": Sent.TENSOR,
    "I": Sent.INT,
    "F": Sent.FLOAT,
    "B": Sent.BOOL,
    "A": Sent.INTS,
}
_RESULTS = {"void": "void", "ints": "Array<int>", "staged": "Tuple<Array<int>, int>"}
LINES = [line.split() for line in (Path(__file__).parent / "signatures.txt").read_text("ascii").splitlines()]


def spelled(name: str, letters: str, result: str) -> str:
    """Return the TypeError's text, as apache-tvm-ffi words it."""
    arguments = ", ".join(f"{at}: {_WORDS[letter]}" for at, letter in enumerate(letters))
    return (
        f"Mismatched number of arguments when calling: `{name}({arguments}) -> {_RESULTS[result]}`. "
        f"Expected {len(letters)} but got 0 arguments"
    )


@pytest.mark.parametrize("line", LINES, ids=lambda line: "-".join(line[:3]))
def test_every_signature_is_read_and_accepts_just_its_own_kinds(line: list[str]) -> None:
    _, _, name, letters, result = line
    for word in (name, ""):  # an object's function has no name
        found = parse_signature(spelled(word, letters, result))
        assert found is not None
        assert (found.name, found.result) == (word, _RESULTS[result])
        assert found.arguments == tuple(_WORDS[letter] for letter in letters)
    sent = [_KINDS[letter] for letter in letters]
    assert found.accepts(sent)
    assert not found.accepts(sent[:-1])
    assert not found.accepts([*sent, Sent.INT])
    for at, letter in enumerate(letters):
        other = Sent.FLOAT if letter == "I" else Sent.INT
        assert not found.accepts([*sent[:at], other, *sent[at + 1 :]])
        if letter == "T":
            assert not found.accepts([*sent[:at], Sent.MAYBE, *sent[at + 1 :]])


@pytest.mark.parametrize("text", ["", "something else", "f(", "f() takes 1 positional argument"])
def test_what_is_no_signature_is_none(text: str) -> None:
    assert parse_signature(text) is None


def test_scalars_and_nothing_have_kinds() -> None:
    assert kinds((True, 3, 0.5, None)) == (Sent.BOOL, Sent.INT, Sent.FLOAT, Sent.MAYBE)


def test_a_function_that_tells_nothing_has_no_signature() -> None:
    def silent() -> None: ...

    def other() -> None:
        raise TypeError("no words")

    assert ask_signature(silent) is None
    assert ask_signature(other) is None
