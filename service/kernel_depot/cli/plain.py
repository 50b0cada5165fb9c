"""Call a command without typer when its arguments are plain: importing typer takes longer than a small sync.

Anything that is not plain (help, an unknown or repeated option, a value that is refused) goes to typer, which
does it or says what is wrong. A test holds the options here equal to those that typer knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple


class Flag(NamedTuple):
    """An option without a value."""

    parameter: str


class Value(NamedTuple):
    """An option with one value; `variable` of the environment stands in for it."""

    parameter: str
    variable: str | None = None
    choices: tuple[str, ...] = ()


class Number(NamedTuple):
    """An option whose value is an integer from 0 to `most`."""

    parameter: str
    most: int


class Values(NamedTuple):
    """An option that may be repeated."""

    parameter: str


Option = Flag | Value | Number | Values


class Plain(NamedTuple):
    """A command's function, which returns the exit status, and its options by their names."""

    module: str
    function: str
    options: Mapping[str, Option]
    arguments: str | None = None  # the parameter that takes the words that are no options, one at least
    needs: tuple[str, ...] = ()  # one of these parameters must be given


PLAIN: dict[str, Plain] = {
    "sync": Plain(
        "kernel_depot.cli.syncing",
        "run_sync",
        {
            "--server": Value("server", "KERNEL_DEPOT_SERVER"),
            "--token": Value("token", "KERNEL_DEPOT_TOKEN"),
            "--cuda": Value("cuda"),
            "--arch": Value("arch"),
            "--sm": Value("sm"),
            "--modules": Value("modules"),
            "--group": Values("groups"),
            "--pins": Values("pins"),
            "--cache": Value("cache", "KERNEL_DEPOT_CACHE"),
            "--views": Value("views"),
            "--with-wheels": Flag("with_wheels"),
            "--offline": Flag("offline"),
            "--allow-incomplete": Flag("allow_incomplete"),
            "--compression": Value("compression", choices=("zstd", "identity")),
            "--jobs": Number("jobs", most=64),
            "--json": Flag("as_json"),
        },
        needs=("server", "offline"),
    ),
    "materialize": Plain(
        "kernel_depot.cli.materializing",
        "run_materialize",
        {
            "--cuda": Value("cuda"),
            "--arch": Value("arch"),
            "--data-dir": Value("data_dir"),
            "--database-url": Value("database_url"),
            "--store-url": Value("store_url"),
            "--allow-file-urls": Flag("allow_file_urls"),
            "--json": Flag("as_json"),
        },
        arguments="pins",
    ),
}


def plain_call(words: Sequence[str], environment: Mapping[str, str]) -> Callable[[], int] | None:
    """Return the call that a plain command line means, None for any other."""
    plain = PLAIN.get(words[0]) if words else None
    if plain is None:
        return None
    given = _read(plain, words[1:])
    if given is None:
        return None
    for option in plain.options.values():
        if isinstance(option, Value) and option.variable and option.parameter not in given:
            value = environment.get(option.variable)
            if value:
                given[option.parameter] = value
    if plain.needs and not any(given.get(name) for name in plain.needs):
        return None
    return partial(getattr(import_module(plain.module), plain.function), **given)


def _read(plain: Plain, words: Sequence[str]) -> dict[str, Any] | None:
    given: dict[str, Any] = {}
    loose: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            loose.append(word)
            continue
        name, equals, text = word.partition("=")
        option = plain.options.get(name)
        if option is None or (option.parameter in given and not isinstance(option, Values)):
            return None
        if isinstance(option, Flag):
            if equals:
                return None
            given[option.parameter] = True
            continue
        if not equals:
            text = next(rest, "-")
        if not text or text.startswith("-"):
            return None
        if isinstance(option, Values):
            given.setdefault(option.parameter, []).append(text)
        elif isinstance(option, Number):
            if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= option.most):
                return None
            given[option.parameter] = int(text)
        elif option.choices and text not in option.choices:
            return None
        else:
            given[option.parameter] = text
    if (plain.arguments is None) == bool(loose):
        return None
    if plain.arguments is not None:
        given[plain.arguments] = loose
    return given
