"""Squared norms of gradients, accurate enough for a difference of nearly equal numbers.

Free functions on tensors; knows nothing of buckets, workers or statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastane._compat import flatten_together

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

_SMALL, _MOST_TOGETHER = 1 << 16, 1 << 20
"""Elements of a tensor that is copied, to be read with others; and of what is read at once."""

_HALF = frozenset({torch.float16, torch.bfloat16})


def squared_norm(tensor: Tensor) -> Tensor:
    """Return `|x|^2` as a float64 scalar on the tensor's device, without waiting for it.

    Norms of rows of 4096 elements, squared and summed in float64, as is what is left behind the
    last row. One float32 dot over 25 million random elements is wrong by 1e-3; this by 1e-8, at the
    same price (a single row by 1e-6, whose rounding the others average out). Rows of half precision
    are summed in float32.

    Args:
        tensor: any shape; overflows to infinity only where a row's norm leaves float32.
    """
    flat = _flat(tensor)
    whole = flat.numel() // ROW * ROW
    if whole == 0:
        return _in_float64(flat)
    dtype = torch.float32 if flat.dtype in _HALF else None
    total = _in_float64(torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=dtype))
    if whole < flat.numel():
        total += _in_float64(flat[whole:])
    return total


def _in_float64(few: Tensor) -> Tensor:
    return torch.linalg.vector_norm(few, dtype=torch.float64).square()


def squared_norm_of_all(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of `squared_norm` over tensors on one device.

    Small ones are copied behind one another first: a call for each of them costs more.
    """
    parts = [squared_norm(flat) for flat in _flattened(tensors)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _flattened(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield large tensors as they are, and small ones of a dtype together, a bounded number."""
    waiting: dict[torch.dtype, list[Tensor]] = {}
    lengths: dict[torch.dtype, int] = {}
    for tensor in tensors:
        size, dtype = tensor.numel(), tensor.dtype
        if size > _SMALL:
            yield tensor
            continue
        together = waiting.setdefault(dtype, [])
        lengths[dtype] = lengths.get(dtype, 0) + size
        if lengths[dtype] > _MOST_TOGETHER:
            yield flatten_together(together)
            waiting[dtype], lengths[dtype] = [tensor], size
        else:
            together.append(tensor)
    for together in waiting.values():
        yield together[0] if len(together) == 1 else flatten_together(together)


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
