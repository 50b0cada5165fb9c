"""Modules shared between builders: taken from whoever built them first, given to the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Lock
from typing import Protocol

from kernel_depot.builder.cache import BuildCache, BuiltModule
from kernel_depot.builder.compile import Stopped
from kernel_depot.builder.errors import BuildError, DepotRefused
from kernel_depot.builder.recipes import Recipe
from kernel_depot.bundle import ArtifactKind
from kernel_depot.errors import DepotError
from kernel_depot.liveness import process_name
from kernel_depot.platform import Sm
from kernel_depot.wheels.inspect import inspect

_log = logging.getLogger(__name__)


class SharedModules(Protocol):
    """Where modules are shared: a depot."""

    def find(self, keys: Sequence[str]) -> dict[str, BuiltModule]:
        """Return what there is under these keys."""

    def fetch(self, built: BuiltModule, target: Path) -> bool:
        """Write a module's bytes to `target`; False when they are not those of its record."""

    def offer(self, built: BuiltModule, library: Path, *, stop: Event | None = None) -> None:
        """Give a module to the others."""


class Sharing:
    """The shared modules of one build. Without any, nothing is taken and nothing given."""

    def __init__(self, shared: SharedModules | None, *, cache: BuildCache, stop: Event) -> None:
        self._shared = shared
        self._cache = cache
        self._stop = stop
        self._lock = Lock()
        self._there: dict[str, BuiltModule] = {}
        self._takes_none = False

    def look(self, keys: Sequence[str]) -> None:
        """Ask which modules there are under these keys. Raise DepotUnreachable or DepotRefused."""
        if self._shared is not None and keys:
            self._there = self._shared.find(keys)

    def take(self, recipe: Recipe, key: str) -> tuple[BuiltModule, Path] | None:
        """Bring a shared module into the cache, None when there is none that fits its recipe.

        Its bytes are checked against its record, and its record and code against the recipe.
        """
        built = self._there.get(key)
        if self._shared is None or built is None:
            return None
        target = self._cache.work / f"shared.{process_name()}"
        try:
            if not self._shared.fetch(built, target):
                why: str | None = "its bytes are not those of its record"
            else:
                why = _misfit(built, target, recipe, key)
            if why is not None:
                _log.warning("%s is compiled here, though the depot has it: %s", recipe.uri, why)
                return None
            return built, self._cache.keep(built, target)
        finally:
            target.unlink(missing_ok=True)

    def give(self, built: BuiltModule, library: Path) -> None:
        """Give a module that is not shared yet. That it could not be given is told, and ends no build."""
        with self._lock:
            if self._shared is None or self._takes_none or built.key in self._there:
                return
        try:
            self._shared.offer(built, library, stop=self._stop)
        except Stopped:
            return
        except BuildError as error:
            _log.warning("%s is not shared: %s", built.uri, error.what)
            if isinstance(error, DepotRefused) and error.says("scope-insufficient", "token-missing"):
                with self._lock:
                    self._takes_none = True


def _misfit(built: BuiltModule, library: Path, recipe: Recipe, key: str) -> str | None:
    """Say what keeps a module from being the recipe's, None when nothing does."""
    if (built.key, built.uri, built.recipe, built.sms) != (key, recipe.uri, recipe.digest, recipe.sms):
        return "its record is of another recipe"
    try:
        found = inspect(library, kind=ArtifactKind.MODULE, arch=None, where=recipe.uri)
    except DepotError as error:
        return error.what
    if found is None or tuple(found.functions) != built.functions:
        return "it does not export what its record says"
    if found.sms and set(found.sms) != {Sm.parse(word).target for word in recipe.sms}:
        return "it has code for other GPUs than its record says"
    return None
