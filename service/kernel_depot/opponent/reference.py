"""Ragged attention in float64, and how far a result is from it."""

from __future__ import annotations

import itertools
import math
from typing import Any, Final

_CHUNK: Final = 1024
"""Queries at once: their scores in float64 take 8 bytes for each key and head of a group."""


def reference(torch: Any, q: Any, k: Any, v: Any, indptr: list[int], *, causal: bool, sm_scale: float) -> Any:
    """Return float64 [rows, num_qo_heads, head_dim] on q's device; `indptr` counts queries and keys."""
    heads, kv_heads = q.shape[1], k.shape[1]
    group = heads // kv_heads
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for start, end in itertools.pairwise(indptr):
        for head in range(kv_heads):
            keys, values = k[start:end, head].double(), v[start:end, head].double()
            columns = torch.arange(end - start, device=q.device)
            mine = slice(head * group, (head + 1) * group)
            for first in range(0, end - start, _CHUNK):
                last = min(first + _CHUNK, end - start)
                queries = q[start + first : start + last, mine].double()
                seen = last if causal else end - start
                scores = torch.einsum("qhd,kd->hqk", queries, keys[:seen]) * sm_scale
                if causal:
                    rows = torch.arange(first, last, device=q.device)
                    scores.masked_fill_(columns[None, None, :seen] > rows[None, :, None], -math.inf)
                weights = torch.softmax(scores, dim=-1)
                out[start + first : start + last, mine] = torch.einsum("hqk,kd->qhd", weights, values[:seen])
    return out


def relative_error(torch: Any, out: Any, wanted: Any) -> float:
    """Return ||out - wanted|| / ||wanted||; NaN when anything was left unwritten."""
    return float(torch.linalg.vector_norm(out.double() - wanted) / torch.linalg.vector_norm(wanted))
