"""Squared norms of gradients, accurate enough for a difference of nearly equal numbers.

Free functions on tensors; knows nothing of buckets, workers or statistics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elastane._compat import foreach_norm

__all__ = ["ROW", "squared_norm", "squared_norm_of_all", "squared_norm_twin"]

ROW = 4096
"""Elements summed in the gradient's own precision before float64 takes over."""


def squared_norm(tensor: Tensor) -> Tensor:
    """Return `|x|^2` as a float64 scalar on the tensor's device, without waiting for it.

    Norms of rows of 4096 elements, squared and summed in float64. One float32 dot over 25 million
    random elements is wrong by 1e-3; this by 1e-8, at the same price (a single row by 1e-6, whose
    rounding the others average out). Half precision is summed in float32.

    Args:
        tensor: any shape; overflows to infinity only where a row's norm leaves float32.
    """
    flat = _flat(tensor)
    dtype = torch.float32 if flat.dtype in (torch.float16, torch.bfloat16) else None
    whole = flat.numel() // ROW * ROW
    if whole == 0:
        return torch.linalg.vector_norm(flat, dtype=dtype).double().square()
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=dtype)
    total = rows.double().square().sum()
    if whole < flat.numel():
        total += torch.linalg.vector_norm(flat[whole:], dtype=dtype).double().square()
    return total


def squared_norm_of_all(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of `squared_norm` over tensors on one device; small ones go in one call."""
    small = [tensor for tensor in tensors if tensor.numel() <= ROW]
    parts = [squared_norm(tensor) for tensor in tensors if tensor.numel() > ROW]
    if small:
        widened = [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in small]
        norms = torch.stack(foreach_norm(widened))
        parts.append(norms.double().square().sum())
    return torch.stack(parts).sum()


def squared_norm_twin(tensor: Tensor) -> float:
    """Return `|x|^2` the plain way: every element in float64. For tests."""
    return float(tensor.detach().double().square().sum())


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in one dimension, in memory order where the memory is dense."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in strides:
        if size != 1 and stride != expected:
            return tensor.reshape(-1)
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))
