"""A model sharded anew for another mesh, in its own place: `fully_shard` has no way back.

Knows modules, the optimizer and the user's function; nothing of groups, members or moving state.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from elastane.elastic.snapshot import load_state, state_of
from elastane.elastic.whole import dealt, dealt_optimizer
from elastane.optimizers import AnyOptimizer, members_of
from elastane.sharding import is_sharded

__all__ = ["Resharding"]


class Resharding:
    """Shards a model over one mesh after another.

    Each time the bare form of the model is copied, sharded while it has no memory yet, and given
    memory for its shards alone. Nothing else keeps a copy of the weights.

    Args:
        model: the bare module. It becomes the sharded one, and then the next: what refers to it,
            and not to its parameters or modules, sees each of them.
        optimizer: of its parameters, or several; each is replaced by the new one of the same name.
        shard: the user's; calls `fully_shard` for a bare module and a mesh.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: AnyOptimizer,
        shard: Callable[[nn.Module, DeviceMesh], Any],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._shard = shard
        self._device = next(model.parameters()).device
        self._form = _without_memory(model)

    def __call__(self, mesh: DeviceMesh) -> nn.Module:
        """Shard the model over a mesh; return its root, which FSDP knows by identity.

        A bare model keeps its weights and the optimizer's state, of which each rank has the
        whole. A model that was sharded loses them: its slices are for others to fill.
        """
        bare = None if is_sharded(self._model) else state_of(self._model, self._optimizer)
        root = copy.deepcopy(self._form)
        _take_modes(root, like=self._model)
        self._shard(root, mesh)
        names = _taken_out(self._optimizer, self._model)
        root.to_empty(device=self._device)
        _become(self._model, root)
        _put_in(self._optimizer, root, names=names)
        gc.collect()  # FSDP's parts hold each other, and the shards that were
        if bare is not None:
            self._fill(bare)
        return root

    def _fill(self, bare: Mapping[str, Any]) -> None:
        own = {"model": state_of(self._model, self._optimizer)["model"]}
        optimizer = dealt_optimizer(bare["optimizer"], optimizer=self._optimizer)
        load_state(self._model, self._optimizer, {**dealt(bare, like=own), "optimizer": optimizer})


def _without_memory(model: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters and buffers have no memory."""
    empty: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        form = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        empty[id(tensor)] = nn.Parameter(form, tensor.requires_grad) if is_parameter else form
    return copy.deepcopy(model, memo=dict(empty))


def _take_modes(root: nn.Module, *, like: nn.Module) -> None:
    """Train what another module of the same form trains."""
    for own, other in zip(root.modules(), like.modules(), strict=True):
        own.training = other.training
    for own, other in zip(root.parameters(), like.parameters(), strict=True):
        own.requires_grad_(other.requires_grad)


def _become(model: nn.Module, root: nn.Module) -> None:
    """Have a module be another one but for its identity, as `fully_shard` changes its class.

    FSDP takes no module twice, so the one that users hold can't be sharded again itself.
    """
    model.__class__ = root.__class__
    model.__dict__ = root.__dict__


def _taken_out(optimizer: AnyOptimizer, model: nn.Module) -> list[list[str]]:
    """Have an optimizer let go of a model's parameters; return their names, group by group."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    names = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"].clear()
    for one in members_of(optimizer):
        one.state.clear()
    return names


def _put_in(optimizer: AnyOptimizer, model: nn.Module, *, names: Sequence[Sequence[str]]) -> None:
    parameters = dict(model.named_parameters())
    for group, own in zip(optimizer.param_groups, names, strict=True):
        group["params"] += [parameters[name] for name in own]
