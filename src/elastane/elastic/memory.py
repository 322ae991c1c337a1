"""Having the system lay out memory before it is written to by somebody whom others wait for.

The first write to a page costs as much as several copies of it: the page is made and cleared, or
copied, where a forked process such as a loader's shares it. Linux only; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

import torch

__all__ = ["make_writable"]

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14; an error before
_LEAST_BYTES = 1 << 20


def make_writable(tensors: Iterable[torch.Tensor]) -> None:
    """Have the pages of large tensors on the CPU in memory, this process's own; values stay.

    Another thread may write to the tensors meanwhile.

    Args:
        tensors: contiguous ones; others are left alone.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.nbytes >= _LEAST_BYTES:
            begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            libc.madvise(
                ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(_POPULATE_WRITE)
            )
