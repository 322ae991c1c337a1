"""What all forms of a sharded model have in common where a replica would have its wrapper.

Knows the sharded tap and who the peers are; nothing of how the model came to be sharded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from elastane.peers import Peers
from elastane.replica import Replica, merge_batch_statistics
from elastane.sharded import ShardedTap

__all__ = ["ShardedModel"]


class ShardedModel:
    """A model that is sharded already, measured by a tap.

    Args:
        model: the module that users hold.
        tap: measures the model's gradients.
    """

    def __init__(self, model: Replica, *, tap: ShardedTap) -> None:
        self.model = model
        self._tap = tap
        self._trainable: frozenset[int] = frozenset()
        self.peers: Peers | None = None

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.model.parameters()).device

    def refresh(self) -> None:
        """Look again where parameters belong, if others train; FSDP itself notices."""
        trainable = frozenset(id(p) for p in self.model.parameters() if p.requires_grad)
        if trainable != self._trainable:
            self._trainable = trainable
            self._tap.find_groups()

    def settle(self) -> None:
        """Do nothing: between two steps FSDP has nothing to do."""

    def merge_statistics(self, *, counted: bool = True) -> None:
        """Give all workers the same running statistics of BatchNorm.

        Args:
            counted: whether this process's own statistics take part.
        """
        if self.peers is not None:
            merge_batch_statistics(
                self.model.inner, sum_over_workers=self.peers.sum, counted=counted
            )

    def plain_buffers(self) -> Iterator[Tensor]:
        """Yield the buffers that are not sharded."""
        yield from (buffer for buffer in self.model.buffers() if type(buffer) is Tensor)

    def spread_buffers(self, group: dist.ProcessGroup) -> None:
        """Give all of a group the plain buffers of its first process."""
        for buffer in self.plain_buffers():
            dist.broadcast(buffer, group=group, group_src=0)
