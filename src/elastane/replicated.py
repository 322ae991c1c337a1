"""A sharded model of which several copies are trained, each by a worker of several processes.

What `elastane.group.Wrapping` is for DDP. Knows shards and groups; nothing of members or steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from elastane import replica
from elastane.peers import Peers
from elastane.sharded import ShardedTap
from elastane.sharding import reshard, sharding_of

__all__ = ["ReplicatedWrapping"]


class ReplicatedWrapping:
    """One copy of a model, sharded over the processes of the default group, which never changes.

    Args:
        model: the module that users hold.
        tap: measures the model's gradients.
        num_shards: processes that hold this copy.
        agree: returns whether something holds on all of them.
    """

    in_shards = False  # over the workers that come and go: each of them has the whole

    def __init__(
        self,
        model: replica.Replica,
        *,
        tap: ShardedTap,
        num_shards: int,
        agree: Callable[[bool], bool],
    ) -> None:
        self.model = model
        self._tap = tap
        self._num_shards = num_shards
        self._agree = agree
        self._trainable: frozenset[int] = frozenset()
        self.peers: Peers | None = None

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.model.parameters()).device

    def use(self, peers: Peers | None, *, spread_weights: bool = False) -> None:
        """Average over the copies from now on.

        Args:
            peers: the processes of all copies; `None` if this is the only one.
            spread_weights: whether the processes of this copy may differ in what is not sharded.
        """
        self.drop()
        own = dist.group.WORLD
        assert own is not None
        self.peers = peers or Peers(own)
        self._tap.attach(
            self.model.inner,
            sharding=sharding_of(self.model.inner, world_size=self._num_shards),
            peers=self.peers,
            is_first_copy=self.peers.group.rank() < self._num_shards,
            agree=self._agree,
        )
        if spread_weights:
            for buffer in self.model.buffers():
                if type(buffer) is Tensor:
                    dist.broadcast(buffer, group=own, group_src=0)

    def refresh(self) -> None:
        """Look again where parameters belong, if others train; FSDP itself notices."""
        trainable = frozenset(id(p) for p in self.model.parameters() if p.requires_grad)
        if trainable != self._trainable:
            self._trainable = trainable
            self._tap.find_groups()

    def settle(self) -> None:
        """Do nothing: FSDP leaves nothing for its second forward."""

    def merge_statistics(self, *, counted: bool = True) -> None:
        """Give all processes of all copies the same running statistics of BatchNorm.

        Args:
            counted: whether this process's own statistics take part.
        """
        assert self.peers is not None
        replica.merge_batch_statistics(
            self.model.inner, sum_over_workers=self.peers.sum, counted=counted
        )

    def drop(self) -> None:
        """Let go of the group; what is sharded can be copied then."""
        self._tap.detach()
        reshard(self.model.inner)
        self.peers = None
