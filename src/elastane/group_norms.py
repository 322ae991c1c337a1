"""Squared norms of a step's gradients by groups of parameters, plain or preconditioned.

Knows parameters and the layout of buckets; nothing of micro-batches, weights or workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from elastane._compat import GradBucket, foreach_mul
from elastane.norms import Run, runs_of_groups, squared_norm_of_all, squared_norms_of_runs

__all__ = ["GroupNorms", "views_of"]


class GroupNorms:
    """Takes squared norms, in float64, of shape (num_groups,), of groups of parameters.

    Args:
        groups: parameters of each group that has statistics of its own, none of them twice.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._groups = [[id(parameter) for parameter in group] for group in groups]
        self._group_of = {one: number for number, group in enumerate(self._groups) for one in group}
        self._runs: dict[tuple[int, ...], Sequence[Run]] = {}
        self._is_uniform = False
        self._factors: Mapping[int, Tensor] = {}

    def expect(self, parameters: Iterable[Tensor]) -> None:
        """Know whose gradients buckets will hold; in one group, no bucket need be looked into."""
        self._is_uniform = len(self._groups) == 1 and all(
            id(parameter) in self._group_of for parameter in parameters
        )

    def precondition(self, factors: Mapping[int, Tensor]) -> None:
        """Multiply gradients by these, element by element, before they are measured.

        Args:
            factors: by the parameters' ids; what has none is left out then. Empty: measure the
                gradients as they are.
        """
        self._factors = factors

    @property
    def preconditions(self) -> bool:
        """Whether gradients are multiplied first."""
        return bool(self._factors)

    def local(self, gradients: Mapping[int, Tensor]) -> Tensor:
        """Return the norms of a micro-batch's gradients, by the parameters' ids."""
        return self._by_group(self._preconditioned(gradients) if self._factors else gradients)

    def mean(self, gradients: Mapping[int, Tensor]) -> Tensor:
        """Return the norms of the mean gradient; behind them those of the preconditioned one."""
        plain = self._by_group(gradients)
        return torch.cat([plain, self.local(gradients)]) if self._factors else plain

    def local_of(self, buffer: Tensor, runs: Sequence[Run], views: Mapping[int, Tensor]) -> Tensor:
        """Return what a bucket adds to `local`.

        Args:
            buffer: of the bucket.
            runs: `runs_of` it.
            views: of its parameters' gradients, by their ids; read if gradients are preconditioned.
        """
        return self.local(views) if self._factors else self._of_buffer(buffer, runs)

    def mean_of(self, buffer: Tensor, runs: Sequence[Run], views: Mapping[int, Tensor]) -> Tensor:
        """Return what a bucket's mean adds to `mean`; arguments as in `local_of`."""
        plain = self._of_buffer(buffer, runs)
        return torch.cat([plain, self.local(views)]) if self._factors else plain

    def runs_of(self, bucket: GradBucket, *, length: int) -> Sequence[Run]:
        """Return the stretches of a bucket's groups; its parameters change once at most.

        Args:
            bucket: of DDP.
            length: elements of its buffer.
        """
        if self._is_uniform:
            return [Run(0, 0, length)]
        parameters = bucket.parameters()
        ids = tuple(map(id, parameters))
        runs = self._runs.get(ids)
        if runs is None:
            groups = [self._group_of.get(one) for one in ids]
            runs = self._runs[ids] = runs_of_groups(groups, [p.numel() for p in parameters])
        return runs

    def _of_buffer(self, buffer: Tensor, runs: Sequence[Run]) -> Tensor:
        return squared_norms_of_runs(buffer, runs, num_groups=len(self._groups))

    def _preconditioned(self, gradients: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        known = [one for one in gradients if one in self._factors]
        if not known:
            return {}
        products = foreach_mul(
            [gradients[one] for one in known], [self._factors[one] for one in known]
        )
        return dict(zip(known, products, strict=True))

    def _by_group(self, gradients: Mapping[int, Tensor]) -> Tensor:
        if len(self._groups) == 1 and gradients:
            return squared_norm_of_all(list(gradients.values()))[None]
        return torch.stack([self._of_group(group, gradients) for group in self._groups])

    def _of_group(self, group: Sequence[int], gradients: Mapping[int, Tensor]) -> Tensor:
        present = [gradients[one] for one in group if one in gradients]
        if present:
            return squared_norm_of_all(present)
        return torch.zeros((), dtype=torch.float64, device=self._device(gradients))

    def _device(self, gradients: Mapping[int, Tensor]) -> torch.device | None:
        some = next(iter(gradients.values()), next(iter(self._factors.values()), None))
        return None if some is None else some.device


def views_of(bucket: GradBucket) -> dict[int, Tensor]:
    """Return a bucket's gradients by the ids of their parameters."""
    return dict(zip(map(id, bucket.parameters()), bucket.gradients(), strict=True))
