"""What every planned kernel needs of its caller on the host: index arrays, page counts and packed masks.

Planning happens on the host, so index arrays are host data: numbers, numpy arrays, CPU tensors. A device's
tensor would have to be waited for, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kernel_depot.kernels.attention import require_positive
from kernel_depot.kernels.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INT32_MAX: Final = 2**31 - 1
_CPU_DEVICES: Final = frozenset({1, 3})
"""DLPack's numbers of plain and of pinned host memory."""


def host_integers(name: str, values: object) -> NDArray[np.int32]:
    """Return one-dimensional host data as int32, copied. Raise InvalidArgument for anything else."""
    import numpy as np

    device = getattr(values, "__dlpack_device__", None)
    if device is not None and int(device()[0]) not in _CPU_DEVICES:
        raise InvalidArgument(
            name,
            expected="integers on the host; planning does not wait for a device",
            found="a device tensor",
        )
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(name, expected="one-dimensional host integers", found=str(error)) from error
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        found = f"{array.dtype} of shape {array.shape}"
        raise InvalidArgument(name, expected="one-dimensional host integers", found=found)
    if array.size and (int(array.max()) > INT32_MAX or int(array.min()) < -INT32_MAX):
        raise InvalidArgument(name, expected="numbers that int32 holds", found=int(np.abs(array).max()))
    return array.astype(np.int32)


def read_indptr(name: str, values: object) -> NDArray[np.int32]:
    """Return an indptr: it starts at 0, never falls, and has one number more than requests, one at least.

    Raise InvalidArgument.
    """
    indptr = host_integers(name, values)
    if indptr.size < 2:
        raise InvalidArgument(name, expected="at least two numbers: one request", found=int(indptr.size))
    if indptr[0] != 0:
        raise InvalidArgument(name, expected="0 at its start", found=int(indptr[0]))
    falls = (indptr[1:] < indptr[:-1]).nonzero()[0]
    if falls.size:
        at = int(falls[0])
        raise InvalidArgument(
            name,
            expected="numbers that never fall",
            found=f"{int(indptr[at + 1])} after {int(indptr[at])}, at {at + 1}",
        )
    return indptr


def require_length(name: str, array: NDArray[np.int32], length: int, *, why: str) -> None:
    """Raise InvalidArgument unless an index array has the wanted length."""
    if array.size != length:
        raise InvalidArgument(name, expected=f"{length} numbers ({why})", found=int(array.size))


@dataclass(frozen=True)
class Pages:
    """A paged cache as its requests see it, on the host. `lengths` are key tokens of each request."""

    indptr: NDArray[np.int32]
    last_page_len: NDArray[np.int32]
    lengths: NDArray[np.int32]
    page_size: int

    @property
    def count(self) -> int:
        """How many page numbers the requests have together."""
        return int(self.indptr[-1])


def read_pages(kv_indptr: object, last_page_len: object, page_size: int, *, batch_size: int) -> Pages:
    """Check a paged cache's index arrays: pages of each request, and tokens on the last page of each.

    A request has 1 to `page_size` tokens on its last page, and 0 when it has no page. Raise InvalidArgument.
    """
    import numpy as np

    require_positive("page_size", page_size)
    indptr = read_indptr("kv_indptr", kv_indptr)
    require_length("kv_indptr", indptr, batch_size + 1, why="one more than requests in qo_indptr")
    last = host_integers("last_page_len", last_page_len)
    require_length("last_page_len", last, batch_size, why="one a request")
    pages = indptr[1:] - indptr[:-1]
    most = np.where(pages > 0, page_size, 0)
    least = np.where(pages > 0, 1, 0)
    wrong = ((last < least) | (last > most)).nonzero()[0]
    if wrong.size:
        at = int(wrong[0])
        raise InvalidArgument(
            "last_page_len",
            expected=f"{int(least[at])} to {int(most[at])} for a request of {int(pages[at])} pages",
            found=f"{int(last[at])}, at {at}",
        )
    lengths = np.maximum(pages.astype(np.int64) - 1, 0) * page_size + last
    if int(lengths.max()) > INT32_MAX:
        raise InvalidArgument(
            "kv_indptr", expected="requests of fewer than 2**31 tokens", found=int(lengths.max())
        )
    return Pages(indptr, last, lengths.astype(np.int32), page_size)


def require_causal(qo_indptr: NDArray[np.int32], kv_lengths: NDArray[np.int32]) -> None:
    """With a causal mask the last query sees the last key: refuse a request of more queries than keys.

    Raise InvalidArgument.
    """
    qo_lengths = qo_indptr[1:] - qo_indptr[:-1]
    wrong = (qo_lengths > kv_lengths).nonzero()[0]
    if wrong.size:
        at = int(wrong[0])
        raise InvalidArgument(
            "qo_indptr",
            expected=f"at most {int(kv_lengths[at])} queries, the keys of request {at} (causal)",
            found=int(qo_lengths[at]),
        )


def mask_indptr(qo_lengths: NDArray[np.int32], kv_lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return where each request's part of a packed mask starts, in bytes; the last number is its size.

    Raise InvalidArgument when the mask is larger than int32 can tell.
    """
    import numpy as np

    sizes = (qo_lengths.astype(np.int64) * kv_lengths + 7) // 8
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
    if int(ends[-1]) > INT32_MAX:
        raise InvalidArgument("custom_mask", expected="fewer than 2**31 bytes", found=int(ends[-1]))
    return ends.astype(np.int32)


def pack_mask(masks: Sequence[Any]) -> NDArray[np.uint8]:
    """Pack one boolean host mask [queries, keys] a request as kernels read them: bits, lowest first.

    Each request starts on a byte of its own. Raise InvalidArgument.
    """
    import numpy as np

    parts = []
    for number, mask in enumerate(masks):
        array = np.asarray(mask)
        if array.ndim != 2 or array.dtype != np.bool_:
            raise InvalidArgument(
                f"masks[{number}]",
                expected="booleans of shape [queries, keys]",
                found=f"{array.dtype} of shape {array.shape}",
            )
        parts.append(np.packbits(array.reshape(-1), bitorder="little"))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint8)
