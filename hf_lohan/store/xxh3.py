"""xxh3 of bytes in memory, for threads that must not hold up others.

The function of the `xxhash` package keeps the lock of Python (GIL) for up to 64 KiB, 100 kB in older versions,
and a granule is no larger: a thread that hashes a chunk would stop all others for as long. The own library of it has
the C function, and a call through ctypes lets the lock go.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import xxhash

logger = logging.getLogger(__name__)

Digest = Callable[[int, int], int]
"""Address and number of bytes to their xxh3, 64 bits of it."""

HashGranules = Callable[[int, int, int], npt.NDArray[np.uint64]]
"""Address, number of bytes and bytes of a granule to the xxh3 of each; the last granule may be short."""

_C_NAMES = ("XXH3_64bits_dispatch", "XXH3_64bits")
"""The first one, of x86, takes the widest vectors that the processor has."""
_SAMPLE_BYTES = (0, 100, 5000)


@cache
def granule_hashing() -> HashGranules:
    """The fastest way that there is here, which lets others run."""
    return partial(one_by_one, digest_function())


def one_by_one(digest: Digest, address: int, num_bytes: int, granule_bytes: int) -> npt.NDArray[np.uint64]:
    """See `HashGranules`. A call for each."""
    stop = address + num_bytes
    starts = range(address, stop, granule_bytes)
    return np.array([digest(start, min(granule_bytes, stop - start)) for start in starts], np.uint64)


@cache
def digest_function() -> Digest:
    """The C function, or where the library keeps it to itself, Python's."""
    library = find_spec("xxhash._xxhash")
    for name in _C_NAMES if library is not None else ():
        assert library is not None
        try:
            function = getattr(ctypes.CDLL(library.origin), name)
        except (AttributeError, OSError):
            continue
        function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_void_p, ctypes.c_size_t)
        if all(_agrees(function, num_bytes) for num_bytes in _SAMPLE_BYTES):
            digest: Digest = function
            return digest
    logger.info("xxhash %s does not show its C functions: checksums hold up other threads", xxhash.VERSION)
    return in_python


def in_python(address: int, num_bytes: int) -> int:
    """xxh3 by the package's own function."""
    return xxhash.xxh3_64_intdigest((ctypes.c_char * num_bytes).from_address(address))


def _agrees(digest: Digest, num_bytes: int) -> bool:
    sample = ctypes.create_string_buffer(bytes(range(256)) * (num_bytes // 256 + 1))
    return digest(ctypes.addressof(sample), num_bytes) == in_python(ctypes.addressof(sample), num_bytes)
