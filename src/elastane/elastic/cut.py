"""A sharded state cut anew for another number of workers, tensor by tensor, and put together there.

Knows DTensor and trees; nothing of who is a worker, groups that open, or steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from elastane.elastic.whole import branches, rebuilt
from elastane.errors import UnsupportedError

__all__ = ["cut", "put_together"]

_PIECE, _SPLIT, _SHAPE = "elastane.piece", "split", "shape"


def cut(tree: Any, *, num_parts: int, wanted: Sequence[int]) -> dict[int, Any]:
    """Return for some ranks of a new mesh what they are to have of a state tree.

    Collective: all ranks of the shards' mesh call it for the same tree, also those that want
    nothing. One tensor at a time is whole on each rank; what is kept of it are the pieces wanted.

    Args:
        tree: dicts, lists and tuples; its DTensors are the same on all ranks.
        num_parts: ranks of the new mesh, of one dimension.
        wanted: some of them.

    Returns:
        For each wanted rank a tree without DTensors; what is no shard is in all of them.

    Raises:
        UnsupportedError: a tensor that is not split along one of its dimensions.
    """
    if isinstance(tree, DTensor):
        return _pieces(tree, num_parts=num_parts, wanted=wanted)
    below = {key: cut(one, num_parts=num_parts, wanted=wanted) for key, one in branches(tree)}
    return {
        rank: rebuilt(tree, {key: pieces[rank] for key, pieces in below.items()}) for rank in wanted
    }


def _pieces(tensor: DTensor, *, num_parts: int, wanted: Sequence[int]) -> dict[int, Any]:
    split = tensor.placements[0]
    if len(tensor.placements) != 1 or not isinstance(split, Shard):
        raise UnsupportedError(
            f"a tensor of the state has the placements {tensor.placements}: workers can change in "
            "place only where each shard is split over the mesh that `shard` was given"
        )
    whole = tensor.full_tensor().detach()
    chunks = whole.chunk(num_parts, split.dim)
    nothing = whole.narrow(split.dim, 0, 0)
    return {
        rank: {
            _PIECE: (chunks[rank] if rank < len(chunks) else nothing).clone(
                memory_format=torch.contiguous_format
            ),
            _SPLIT: split.dim,
            _SHAPE: list(whole.shape),
        }
        for rank in wanted
    }


def put_together(tree: Any, *, mesh: DeviceMesh, device: torch.device) -> Any:
    """Return the tree of this rank's pieces with shards over a mesh in their place.

    Without communication.

    Args:
        tree: made by `cut` for this rank of the mesh.
        mesh: of as many ranks as it was cut for.
        device: where shards lie.
    """
    if isinstance(tree, dict) and _PIECE in tree:
        shape = torch.Size(tree[_SHAPE])
        return DTensor.from_local(
            tree[_PIECE].to(device),
            mesh,
            [Shard(tree[_SPLIT])],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
    together = {key: put_together(one, mesh=mesh, device=device) for key, one in branches(tree)}
    return rebuilt(tree, together)
