"""A sharded model where a replica would have its wrapper: sharded over the workers, and measured.

Knows FSDP2, process groups and the sharded tap; nothing of optimizers, state or who decides.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from elastane._compat import HashStore
from elastane.peers import Peers
from elastane.replica import Replica
from elastane.sharded import ShardedTap
from elastane.sharded_model import ShardedModel
from elastane.sharding import Sharding, local_of, reshard, sharding_of

__all__ = ["ShardedWrapping"]


class ShardedWrapping(ShardedModel):
    """The sharded model in place of a wrapper: what `elastane.group.Wrapping` is for DDP.

    Args:
        model: the module that users hold.
        tap: measures the model's gradients.
        build: shards the model over a mesh of all workers, in its place, and returns its root; a
            bare model keeps its weights, one that was sharded loses them. `None` for a model that
            its user has sharded.
    """

    in_shards = True

    def __init__(
        self,
        model: Replica,
        *,
        tap: ShardedTap,
        build: Callable[[DeviceMesh], nn.Module] | None = None,
    ) -> None:
        super().__init__(model, tap=tap)
        self._build = build
        self._root = model.inner
        self._is_alone_in_group = False
        self.mesh: DeviceMesh | None = None

    def use(self, peers: Peers | None, *, spread_weights: bool = True) -> None:
        """Shard over a group, if that is the session's to do, and measure over it from now on.

        Args:
            peers: all workers, or `None`.
            spread_weights: whether all copies get the weights of the first, and bare models
                those of rank 0.
        """
        self.drop()
        if self._build is not None:
            if peers is not None and spread_weights:
                self._call(peers, lambda: self._spread_bare(peers))
            self.mesh = self._mesh(peers)
            self._root = self._build(self.mesh)
            self.model.follow()
        world_size = 1 if peers is None else dist.get_world_size(peers.group)
        sharding = sharding_of(self.model.inner, world_size=world_size)
        self._tap.attach(self._root, sharding=sharding, peers=peers)
        self.peers = peers
        if peers is not None and spread_weights:
            self._call(peers, lambda: self._spread(sharding, peers))

    def _call(self, peers: Peers, action: Callable[[], None]) -> None:
        peers.call(action, on_host=self.device.type == "cpu")

    def _mesh(self, peers: Peers | None) -> DeviceMesh:
        """Return the mesh of all workers; one alone opens a group of itself, as FSDP wants one."""
        if peers is None and not dist.is_initialized():
            _open_alone(self.device)
            self._is_alone_in_group = True
        group = dist.group.WORLD if peers is None else peers.group
        assert group is not None
        return DeviceMesh.from_group(group, self.device.type, mesh_dim_names=("shard",))

    @torch.no_grad()
    def _spread_bare(self, peers: Peers) -> None:
        for tensor in (*self.model.parameters(), *self.plain_buffers()):
            dist.broadcast(tensor.detach(), group=peers.group, group_src=0)

    @torch.no_grad()
    def _spread(self, sharding: Sharding, peers: Peers) -> None:
        """Give all copies the weights of the first, and all ranks the buffers of rank 0."""
        if sharding.num_replicas > 1:
            replicas = sharding.mesh.get_group(0)
            for parameter in self.model.parameters():
                dist.broadcast(local_of(parameter), group=replicas, group_src=0)
        self.spread_buffers(peers.group)

    def rehearse(self) -> None:
        """Pay for what a process pays for once, before it shards over others, who would wait."""
        layer = nn.Linear(1, 1, device=self.device)
        fully_shard(layer, mesh=self._mesh(None))
        layer(torch.ones(1, 1, device=self.device)).sum().backward()
        self.drop()

    def reshard(self) -> None:
        """Have the model hold its shards alone, as a state that is cut anew needs it."""
        reshard(self._root)

    def drop(self) -> None:
        """Let go of the group; what is sharded can be copied then."""
        if self.peers is not None:
            self.peers.breaker.await_returns()
        self._tap.detach()
        self.reshard()
        self.peers = self.mesh = None
        if self._is_alone_in_group:
            self._is_alone_in_group = False
            dist.destroy_process_group()


def _open_alone(device: torch.device) -> None:
    """Open a default group of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
