"""A sharded training's state as whole tensors on the CPU, and from those back into shards.

Knows DTensor and trees; nothing of meshes' meaning, files or steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

__all__ = ["branches_of", "dealt", "dealt_optimizer", "gathered", "rebuilt"]


def gathered(tree: Any, *, keep: bool) -> Any:
    """Return a copy of a state tree on the CPU in which every shard is a whole tensor.

    Collective: all ranks of the shards' mesh must call it for the same tree. One tensor at a time
    is whole on each rank's device; all of them lie together on the CPU of those that keep them.

    Args:
        tree: dicts, lists and tuples; its DTensors are the same on all ranks.
        keep: whether this rank wants the copy; without, it gets `None` for each tensor.
    """
    if isinstance(tree, torch.Tensor):
        whole = tree.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        return whole.to("cpu", copy=not isinstance(tree, DTensor)) if keep else None
    return rebuilt(tree, {key: gathered(one, keep=keep) for key, one in branches_of(tree)})


def dealt(tree: Any, *, like: Any) -> Any:
    """Return a state tree in which a tensor is a shard where another tree has one.

    Without communication: each rank takes its part of what it has whole.

    Args:
        tree: with whole tensors.
        like: tree of the same form, of the training that will take up the state; what it lacks
            stays whole.
    """
    if isinstance(like, DTensor) and isinstance(tree, torch.Tensor):
        return _shard_of(tree, like)
    known = dict(branches_of(like))
    return rebuilt(tree, {key: dealt(one, like=known.get(key)) for key, one in branches_of(tree)})


def branches_of(tree: Any) -> Iterable[tuple[Any, Any]]:
    """Return the branches of a tree by their names or numbers; none of a leaf."""
    if isinstance(tree, dict):
        return tree.items()
    return enumerate(tree) if isinstance(tree, (list, tuple)) else ()


def rebuilt(tree: Any, branches: Mapping[Any, Any]) -> Any:
    """Return a tree with other branches; a leaf as it is."""
    if isinstance(tree, dict):
        return type(tree)(branches)
    if isinstance(tree, list):
        return list(branches.values())
    return tuple(branches.values()) if isinstance(tree, tuple) else tree


def dealt_optimizer(state: Mapping[str, Any], *, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state in which a tensor is a shard where its parameter is one.

    The optimizer may not have stepped yet; whatever has its parameter's shape is split like it.
    """
    own = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameter_of = dict(zip(numbers, own, strict=False))
    return {
        **state,
        "state": {
            number: {
                name: _like_parameter(value, parameter_of.get(number))
                for name, value in values.items()
            }
            for number, values in state["state"].items()
        },
    }


def _like_parameter(value: Any, parameter: nn.Parameter | None) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(parameter, DTensor):
        return value
    return _shard_of(value, parameter) if value.shape == parameter.shape else value


def _shard_of(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    if isinstance(whole, DTensor):
        return whole
    device = like.to_local().device
    return distribute_tensor(
        whole.to(device), like.device_mesh, like.placements, src_data_rank=None
    )
