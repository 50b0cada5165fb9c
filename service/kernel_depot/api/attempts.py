"""Failed tokens, counted by the address they come from: guesses, and loops with old tokens, cost little."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from kernel_depot.api.problems import ApiError
from kernel_depot.catalog.record import secret_digest

BURST: Final = 30
"""Failures that one address may have at once."""

PER_SECOND: Final = 0.5
"""How many more it may have each second."""

_REMEMBERED: Final = 4096


class TooManyFailures(ApiError):
    """An address from which too many refused tokens came."""

    slug = "too-many-failures"
    title = "Too many refused tokens from this address"
    status = 429


@dataclass
class Attempts:
    """A bucket of failures for each address. A token that was good passes whatever its address did."""

    clock: Callable[[], float] = time.monotonic
    _spent: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)
    _good: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    def check(self, address: str, secret: str) -> None:
        """Raise TooManyFailures, before the token is looked up, when the address has no failures left."""
        with self._lock:
            spent = self._now(address)
            if spent <= BURST - 1 or secret_digest(secret) in self._good:
                return
        seconds = math.ceil((spent - (BURST - 1)) / PER_SECOND)
        raise TooManyFailures(
            "too many refused tokens came from this address",
            where="Authorization",
            remedy=f"stop asking with tokens that are refused; try again in {seconds} s",
            headers={"retry-after": str(seconds)},
        )

    def failed(self, address: str, secret: str) -> None:
        """Count a refused token."""
        with self._lock:
            self._good.pop(secret_digest(secret), None)
            self._spent[address] = (self._now(address) + 1.0, self.clock())
            self._spent.move_to_end(address)
            while len(self._spent) > _REMEMBERED:
                self._spent.popitem(last=False)

    def good(self, secret: str) -> None:
        """Remember a token that is valid."""
        digest = secret_digest(secret)
        with self._lock:
            self._good[digest] = None
            self._good.move_to_end(digest)
            while len(self._good) > _REMEMBERED:
                self._good.popitem(last=False)

    def _now(self, address: str) -> float:
        spent, at = self._spent.get(address, (0.0, 0.0))
        return max(0.0, spent - (self.clock() - at) * PER_SECOND)
