"""A sharded model of which several copies are trained, each by a worker of several processes.

What `elastane.group.Wrapping` is for DDP. Knows shards and groups; nothing of members or steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from elastane.peers import Peers
from elastane.replica import Replica
from elastane.sharded import ShardedTap
from elastane.sharded_model import ShardedModel
from elastane.sharding import reshard, sharding_of

__all__ = ["ReplicatedWrapping"]


class ReplicatedWrapping(ShardedModel):
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
        model: Replica,
        *,
        tap: ShardedTap,
        num_shards: int,
        agree: Callable[[bool], bool],
    ) -> None:
        super().__init__(model, tap=tap)
        self._num_shards = num_shards
        self._agree = agree

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
            self.spread_buffers(own)

    def drop(self) -> None:
        """Let go of the group; what is sharded can be copied then."""
        if self.peers is not None:
            self.peers.breaker.await_returns()
        self._tap.detach()
        reshard(self.model.inner)
        self.peers = None
