"""A kernel function's own signature, as its TypeError spells it, against what a call would send.

A call without arguments raises TypeError with the whole signature and touches no GPU (apache-tvm-ffi,
function.h); one that an object of the module gives is spelled without a name. Types are in C++ terms:
`DLTensor*`, `ffi.Tensor`, `Optional<...>`, `Array<int>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

_SIGNATURE = re.compile(
    r"(?P<name>\w*)\((?P<arguments>\d+: .*?)?\) -> (?P<result>[\w.<>*, ]+?)(?:[`'\"]|$|\n)"
)
_ARGUMENT = re.compile(r"\d+: (.+?)(?=, \d+: |$)")


class Sent(str, Enum):
    """One argument as the typed calls send it."""

    TENSOR = "tensor"
    MAYBE = "tensor or None"
    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    INTS = "ints"
    TENSORS = "tensors or None"
    STRINGS = "strings"
    MAYBE_INTS = "ints or None"
    DTYPE = "dtype"

    def __str__(self) -> str:
        return self.value


_TAKES = {
    Sent.TENSOR: {
        "DLTensor*",
        "ffi.Tensor",
        "Tensor",
        "object.Tensor",
        "Optional<DLTensor*>",
        "Optional<ffi.Tensor>",
    },
    Sent.MAYBE: {"Optional<DLTensor*>", "Optional<ffi.Tensor>", "Optional<Tensor>"},
    Sent.INT: {"int"},
    Sent.FLOAT: {"float"},
    Sent.BOOL: {"bool"},
    Sent.INTS: {"Array<int>"},
    Sent.TENSORS: {"Optional<Array<ffi.Tensor>>", "Optional<Array<DLTensor*>>"},
    Sent.STRINGS: {"Array<str>", "Array<ffi.String>"},
    Sent.MAYBE_INTS: {"Optional<Array<int>>"},
    Sent.DTYPE: {"DataType", "dtype"},
}
"""The C++ types that accept each kind."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function takes, in order, and what it returns, in its own words."""

    name: str
    arguments: tuple[str, ...]
    result: str

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.arguments)}) -> {self.result}"

    def accepts(self, sent: Sequence[Sent]) -> bool:
        """Tell whether arguments of these kinds fit, one for one."""
        return len(sent) == len(self.arguments) and all(
            argument in _TAKES[kind] for kind, argument in zip(sent, self.arguments, strict=True)
        )


def kinds(values: Sequence[Any]) -> tuple[Sent, ...]:
    """Return the kinds of scalars and of absent tensors, for which None stands."""
    words = {bool: Sent.BOOL, int: Sent.INT, float: Sent.FLOAT}
    return tuple(Sent.MAYBE if value is None else words[type(value)] for value in values)


def parse_signature(text: str) -> Signature | None:
    """Read the signature out of a TypeError's text; None when there is none."""
    match = _SIGNATURE.search(text)
    if match is None:
        return None
    arguments = tuple(_ARGUMENT.findall(match["arguments"] or ""))
    return Signature(match["name"], arguments, match["result"].strip())


def ask_signature(function: Any) -> Signature | None:
    """Ask a loaded function for its signature. None when it takes no argument, or does not tell.

    The function must take arguments: it is called without any.
    """
    try:
        function()
    except TypeError as error:
        return parse_signature(str(error))
    return None
