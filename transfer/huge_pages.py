"""Large pages for arenas: reading another process's memory costs the kernel per page, so pages should be large.

Measured on a 2-core virtual machine, 128 MB in blocks of 114 KB: 0.4 to 0.6 of a plain memory copy with pages of
4 KB, 0.8 to 0.9 with pages of 2 MB.
"""

import ctypes
import logging
import mmap
import os

from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1; also for pages that are in use already
_log = logging.getLogger(__name__)


def use_huge_pages(arena: Tensor) -> bool:
    """Ask Linux to back a CPU tensor with large pages, contents kept; True when it did.

    Tensors below 2 MB and other systems are left as they are, and so is memory for which the kernel says no: then
    reads are slower, not wrong.
    """
    num_bytes = arena.numel() * arena.element_size()
    if os.uname().sysname != "Linux" or num_bytes < _HUGE_PAGE_BYTES:
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    first = -(-arena.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (arena.data_ptr() + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
        if madvise(first, end - first, advice):
            _log.info("no large pages for %d bytes: %s", num_bytes, os.strerror(ctypes.get_errno()))
            return False
    return True
