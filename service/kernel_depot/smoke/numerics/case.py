"""A case: a name, and what computes, judges and says how far off it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # these need numpy, which a node's base install lacks
    from kernel_depot.smoke.numerics.bench import Bench
    from kernel_depot.smoke.numerics.verdict import Distance

LIMITS: Final = {"f16": 1e-3, "bf16": 8e-3}
"""Relative to the norm of the reference, by the output's format: about three units of its last place.

FlashInfer's own tests allow 1e-3 + 1e-3 |x| an element for f16 and 1e-2 for bf16.
"""


class Skipped(Exception):
    """A case that this host or this bundle cannot run; the text says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """One computation by one module.

    `run` raises Wrong for a wrong output, Skipped where it cannot run, and the kernels room's errors.
    """

    name: str
    run: Callable[[Bench], list[Distance]]
