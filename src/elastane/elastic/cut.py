"""A sharded state as pieces: cut anew for other workers, or as it lies; and put together there.

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

__all__ = ["cut", "own_pieces", "put_together"]

_PIECE, _SPLIT, _SHAPE, _STRIDE = "elastane.piece", "split", "shape", "stride"


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


def own_pieces(tree: Any) -> Any:
    """Return what a rank of an equal mesh is to have of a state tree: what this rank has of it.

    Without communication, or a copy.

    Args:
        tree: dicts, lists and tuples; its DTensors lie on a mesh of one dimension.

    Raises:
        UnsupportedError: a tensor that is not split along one of its dimensions.
    """
    if isinstance(tree, DTensor):
        return _piece(tree.to_local().detach(), of=tree, stride=tree.stride())
    return rebuilt(tree, {key: own_pieces(one) for key, one in branches(tree)})


def _pieces(tensor: DTensor, *, num_parts: int, wanted: Sequence[int]) -> dict[int, Any]:
    split = _split_of(tensor)
    whole = tensor.full_tensor().detach()
    chunks = whole.chunk(num_parts, split)
    nothing = whole.narrow(split, 0, 0)
    own = [chunks[rank] if rank < len(chunks) else nothing for rank in wanted]
    stride = torch.empty(whole.shape, device="meta").stride()
    return {
        rank: _piece(one.clone(memory_format=torch.contiguous_format), of=tensor, stride=stride)
        for rank, one in zip(wanted, own, strict=True)
    }


def _piece(piece: torch.Tensor, *, of: DTensor, stride: Sequence[int]) -> dict[str, Any]:
    form = {_SPLIT: _split_of(of), _SHAPE: list(of.shape), _STRIDE: list(stride)}
    return form | {_PIECE: piece}


def _split_of(tensor: DTensor) -> int:
    """Return the dimension that a tensor is split along."""
    split = tensor.placements[0]
    if len(tensor.placements) != 1 or not isinstance(split, Shard):
        raise UnsupportedError(
            f"a tensor of the state has the placements {tensor.placements}: workers can change in "
            "place only where each shard is split over the mesh that `shard` was given"
        )
    return split.dim


def put_together(tree: Any, *, mesh: DeviceMesh, device: torch.device) -> Any:
    """Return the tree of this rank's pieces with shards over a mesh in their place.

    Without communication. What has no pieces stays as it is.

    Args:
        tree: made by `cut` for this rank of the mesh, or by `own_pieces` on the same rank of one.
        mesh: of as many ranks as it was cut for.
        device: where shards lie.
    """
    if isinstance(tree, dict) and _PIECE in tree:
        return DTensor.from_local(
            tree[_PIECE].to(device),
            mesh,
            [Shard(tree[_SPLIT])],
            run_check=False,
            shape=torch.Size(tree[_SHAPE]),
            stride=tuple(tree[_STRIDE]),
        )
    together = {key: put_together(one, mesh=mesh, device=device) for key, one in branches(tree)}
    return rebuilt(tree, together)
