"""A sharded training's state as this process's parts of it, and back: for who holds the same ones.

Knows DTensor and trees; nothing of groups, or of how a tree is moved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from elastane.elastic.whole import branches_of, rebuilt

__all__ = ["joined", "parts_of"]

_MARK = "shard of shape"


def parts_of(tree: Any) -> Any:
    """Return a state tree in which a mapping, with a plain tensor, stands for each shard.

    Args:
        tree: dicts, lists and tuples; its DTensors lie on a mesh of one dimension.
    """
    if isinstance(tree, DTensor):
        (placement,) = tree.placements
        assert isinstance(placement, Shard)
        form = {_MARK: list(tree.shape), "stride": list(tree.stride()), "dim": placement.dim}
        return form | {"part": tree.to_local().detach()}
    return rebuilt(tree, {key: parts_of(one) for key, one in branches_of(tree)})


def joined(tree: Any, *, mesh: DeviceMesh | None) -> Any:
    """Return the state tree that `parts_of` was called with, on another mesh.

    Args:
        tree: with mappings for shards; their tensors are taken over, not copied.
        mesh: on which this process has the place that the other had on its own.
    """
    if isinstance(tree, dict) and _MARK in tree:
        return DTensor.from_local(
            tree["part"],
            mesh,
            [Shard(tree["dim"])],
            run_check=False,
            shape=torch.Size(tree[_MARK]),
            stride=tuple(tree["stride"]),
        )
    return rebuilt(tree, {key: joined(one, mesh=mesh) for key, one in branches_of(tree)})
