"""Squared norms of gradients, accurate enough for a difference of nearly equal numbers.

Free functions on tensors; knows nothing of buckets, workers or statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastane._compat import foreach_norm

__all__ = [
    "ROW",
    "Run",
    "runs_of_groups",
    "squared_norm",
    "squared_norm_of_all",
    "squared_norm_twin",
    "squared_norms_of_runs",
]

ROW = 4096
"""Elements summed in the gradient's own precision before float64 takes over."""


_HALF = frozenset({torch.float16, torch.bfloat16})


def squared_norm(tensor: Tensor) -> Tensor:
    """Return `|x|^2` as a float64 scalar on the tensor's device, without waiting for it.

    Norms of rows of 4096 elements, squared and summed in float64. One float32 dot over 25 million
    random elements is wrong by 1e-3; this by 1e-8, at the same price (a single row by 1e-6, whose
    rounding the others average out). Half precision is summed in float32.

    Args:
        tensor: any shape; overflows to infinity only where a row's norm leaves float32.
    """
    flat = _flat(tensor)
    dtype = torch.float32 if flat.dtype in _HALF else None
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
    small: list[Tensor] = []
    parts: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel() > ROW:
            parts.append(squared_norm(tensor))
        else:
            small.append(tensor)
    if small:
        if not _HALF.isdisjoint([tensor.dtype for tensor in small]):
            small = [t.float() if t.dtype in _HALF else t for t in small]
        parts.append(torch.stack(foreach_norm(small)).double().square().sum())
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of a flat buffer that belongs to one group of parameters, or to none."""

    group: int | None
    start: int
    stop: int


def runs_of_groups(groups: Sequence[int | None], sizes: Sequence[int]) -> list[Run]:
    """Return the stretches of a buffer that holds tensors of these groups and sizes in a row."""
    runs: list[Run] = []
    start = 0
    for group, size in zip(groups, sizes, strict=True):
        if runs and runs[-1].group == group:
            runs[-1] = Run(group, runs[-1].start, start + size)
        else:
            runs.append(Run(group, start, start + size))
        start += size
    return runs


def squared_norms_of_runs(buffer: Tensor, runs: Sequence[Run], *, num_groups: int) -> Tensor:
    """Return the squared norms of the groups' stretches, in float64, of shape (num_groups,)."""
    if num_groups == 1 and len(runs) == 1 and runs[0].group == 0:
        return squared_norm(buffer)[None]
    norms = torch.zeros(num_groups, dtype=torch.float64, device=buffer.device)
    for run in runs:
        if run.group is not None:
            norms[run.group] += squared_norm(buffer[run.start : run.stop])
    return norms


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
