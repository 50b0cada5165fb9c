"""Inflate one whole member into memory that is used again for the next one.

libdeflate inflates raw deflate streams (RFC 1951) a quarter faster than isal. The distribution `deflate`
brings it as a Python extension; its own function neither writes into given memory nor tells how much of the
input it used, which a strict reader must know, so the library inside is called directly. isal takes its
place where that library is not to be had.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Protocol, cast

from isal import isal_zlib

ROOM = 4 << 20
"""Bytes that one inflater holds at a time."""

# The library's stub takes this class for an instance.
_DeflateError = cast("type[Exception]", isal_zlib.error)


class Inflater(Protocol):
    """Inflates members of at most ROOM bytes; for one thread at a time."""

    def inflate(self, packed: bytes, size: int) -> memoryview | None:
        """Return the content, valid until the next call.

        None unless `packed` is exactly one deflate stream of exactly `size` bytes.
        """
        ...

    def crc32(self, content: memoryview) -> int:
        """Return the CRC-32 of what `inflate` returned last."""
        ...


def open_inflater() -> Inflater:
    """Return the fastest inflater there is here."""
    library = _libdeflate()
    return _Isal() if library is None else _Libdeflate(library)


class _Libdeflate:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._decompress: Any = library.libdeflate_deflate_decompress_ex
        self._crc32: Any = library.libdeflate_crc32
        self._free: Any = library.libdeflate_free_decompressor
        self._handle = library.libdeflate_alloc_decompressor()
        if not self._handle:
            raise MemoryError("libdeflate has no memory for a decompressor")
        self._memory = mmap.mmap(-1, ROOM)
        self._room = memoryview(self._memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._used = ctypes.c_size_t()
        self._made = ctypes.c_size_t()
        self._results = (ctypes.addressof(self._used), ctypes.addressof(self._made))

    def inflate(self, packed: bytes, size: int) -> memoryview | None:
        if size > ROOM:
            return None
        status = self._decompress(self._handle, packed, len(packed), self._address, size, *self._results)
        if status or self._used.value != len(packed) or self._made.value != size:
            return None
        return self._room[:size]

    def crc32(self, content: memoryview) -> int:
        return int(self._crc32(0, self._address, len(content)))

    def __del__(self) -> None:
        self._free(self._handle)


class _Isal:
    def inflate(self, packed: bytes, size: int) -> memoryview | None:
        stream = isal_zlib.decompressobj(-15)
        try:
            content = stream.decompress(packed, size + 1)
        except _DeflateError:
            return None
        if len(content) != size or not stream.eof or stream.unused_data:
            return None
        return memoryview(content)

    def crc32(self, content: memoryview) -> int:
        return isal_zlib.crc32(content)


@lru_cache(maxsize=1)
def _libdeflate() -> ctypes.CDLL | None:
    """Load libdeflate out of the extension module that contains it; None where it does not show."""
    try:
        spec = find_spec("deflate._deflate")
        if spec is None or spec.origin is None:
            return None
        library = ctypes.CDLL(spec.origin)
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        library.libdeflate_alloc_decompressor.argtypes = ()
        library.libdeflate_alloc_decompressor.restype = pointer
        library.libdeflate_free_decompressor.argtypes = (pointer,)
        library.libdeflate_free_decompressor.restype = None
        library.libdeflate_deflate_decompress_ex.argtypes = (
            pointer, ctypes.c_char_p, size, pointer, size, pointer, pointer,
        )  # fmt: skip
        library.libdeflate_crc32.argtypes = (ctypes.c_uint32, pointer, size)
        library.libdeflate_crc32.restype = ctypes.c_uint32
    except (ImportError, OSError, AttributeError):
        return None
    return library
