"""Large pages for packed weights: a decode step streams all of them, and 4 KiB pages make the TLB the bottleneck.

Linux only, and only where the system allows it (transparent huge pages at `madvise` or `always`, Linux 6.1 or later);
elsewhere nothing happens. Measured on a 135M model at 8 bits: about a tenth less time per token.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HUGE_PAGE = 2 << 20  # bytes, on x86-64 and on arm64 with 4 KiB pages
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # from linux/mman.h
MAPS = Path("/proc/self/maps")


@contextmanager
def huge_pages_for_new_memory() -> Iterator[None]:
    """Memory that the block allocates and still holds at its end moves to huge pages, as far as the system does it."""
    before = _anonymous_regions()
    yield
    for start, end in _difference(_anonymous_regions(), before):
        _collapse(start, end)


def _anonymous_regions() -> list[tuple[int, int]]:
    """(start, end) of the writable memory that belongs to no file, in order; empty where it cannot be read."""
    if not sys.platform.startswith("linux"):
        return []
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:
        return []
    regions = []
    for line in lines:
        span, access, _, _, inode, *name = line.split(maxsplit=5)
        if access.startswith("rw") and inode == "0" and (not name or name[0] == "[heap]"):
            start, end = (int(word, 16) for word in span.split("-"))
            regions.append((start, end))
    return regions


def _difference(after: list[tuple[int, int]], before: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What of `after` is not in `before`, both in order."""
    for start, end in after:
        for old_start, old_end in before:
            if old_end <= start or end <= old_start:
                continue
            if start < old_start:
                yield start, old_start
            start = max(start, old_end)
        if start < end:
            yield start, end


def _collapse(start: int, end: int) -> None:
    """Ask for huge pages in a span of memory. A refusal costs speed only, so it is no error."""
    start, end = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
    if start >= end:
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if madvise(start, end - start, MADV_HUGEPAGE) == 0:
        madvise(start, end - start, MADV_COLLAPSE)
