"""The shapes a ragged prefill is measured at: the default grid, or those of a TOML file."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from kernel_depot.opponent.errors import ShapesInvalid

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HEAD_DIMS: Final = (128, 256)
_INT32_MAX: Final = 2**31 - 1
_QO_HEADS: Final = {128: 32, 256: 16}
"""Query heads of the default grid, so that both head dimensions have 4,096 columns."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One batch: `rows` tokens split into `batch` requests by a draw from `seed`; as many keys as queries."""

    batch: int
    rows: int
    head_dim: int
    num_qo_heads: int
    num_kv_heads: int
    causal: bool
    seed: int = 0

    def lengths(self) -> list[int]:
        """Return each request's tokens: at least one, drawn from the seed, `rows` together."""
        cuts = sorted(random.Random(self.seed).sample(range(1, self.rows), self.batch - 1))  # noqa: S311
        return [end - start for start, end in itertools.pairwise([0, *cuts, self.rows])]

    def indptr(self) -> list[int]:
        """Return where each request starts, and the end."""
        return [0, *itertools.accumulate(self.lengths())]

    def flops(self) -> int:
        """Count the floating-point operations of both products over the pairs that are not masked."""
        pairs = sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths())
        return 4 * pairs * self.num_qo_heads * self.head_dim

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return asdict(self)

    def __str__(self) -> str:
        heads = f"{self.num_qo_heads}/{self.num_kv_heads}"
        mask = "causal" if self.causal else "full"
        return f"batch {self.batch}, {self.rows} rows, hd {self.head_dim}, heads {heads}, {mask}"


def default_shapes(seed: int = 0) -> list[Shape]:
    """Return batch 1, 4, 16 x 512 to 16,384 rows x head dimension 128, 256 x GQA 1, 4, 8 x full, causal."""
    grid = itertools.product((1, 4, 16), (512, 2048, 8192, 16384), HEAD_DIMS, (1, 4, 8), (False, True))
    return [
        Shape(batch, rows, dim, _QO_HEADS[dim], _QO_HEADS[dim] // group, causal, seed)
        for batch, rows, dim, group, causal in grid
    ]


def read_shapes(path: Path) -> list[Shape]:
    """Read tables `[[shape]]` of a TOML file. Raise ShapesInvalid, which names the table and the key."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ShapesInvalid(f"{path.name} cannot be read: {error}", where=str(path)) from error
    tables = document.get("shape")
    if not isinstance(tables, list) or not tables or len(document) > 1:
        raise ShapesInvalid("expected tables [[shape]] and nothing else", where=str(path))
    return [read_shape(table, where=f"{path}, shape {number}") for number, table in enumerate(tables, 1)]


def read_shape(table: Any, *, where: str) -> Shape:
    """Read a shape's members, `seed` 0 when absent. Raise ShapesInvalid, which names the key."""
    names: Sequence[str] = [item.name for item in fields(Shape)]
    if not isinstance(table, dict) or set(table) - set(names):
        raise ShapesInvalid("a shape has other keys", where=where, expected=names, found=list(table))
    for name in names:
        wanted = bool if name == "causal" else int
        value = table.get(name, 0 if name == "seed" else None)
        least = 0 if name == "seed" else 1
        if type(value) is not wanted or (wanted is int and not least <= value <= _INT32_MAX):
            expected = "true or false" if wanted is bool else f"an integer, {least} to 2**31 - 1"
            raise ShapesInvalid(f"{name} is wrong", where=where, expected=expected, found=value)
    shape = Shape(**table)
    if shape.head_dim not in HEAD_DIMS:
        raise ShapesInvalid("no opponent for it", where=where, expected=HEAD_DIMS, found=shape.head_dim)
    if shape.num_qo_heads % shape.num_kv_heads:
        raise ShapesInvalid("num_kv_heads must divide num_qo_heads", where=where, found=table)
    if shape.batch > shape.rows:
        raise ShapesInvalid("a request has a row at least", where=where, found=table)
    return shape
