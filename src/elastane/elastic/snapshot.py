"""A model's and an optimizer's state as one tree that holds their own tensors, and back in place.

Knows modules and optimizers; nothing of how a tree is moved or kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elastane.errors import StateError
from elastane.optimizers import AnyOptimizer, Optimizers, members_of
from elastane.sharding import local_of
from elastane.zero import is_zero, load_zero_state, zero_state_of

__all__ = ["load_state", "state_of", "tensors_of"]


def state_of(model: nn.Module, optimizer: AnyOptimizer) -> dict[str, Any]:
    """Return the state of a model and its optimizer as a tree for transfers and checkpoints.

    The tensors are the model's and the optimizer's own, detached: the tree shows what they hold
    at any later time. Parameters that are tied occur once. With a ZeroRedundancyOptimizer it is
    collective, and rank 0 alone gets the optimizer's state.

    Args:
        model: the bare module, or a `Replica`.
        optimizer: the model's optimizer, or several.

    Returns:
        `"model"`: all parameters, then all buffers (persistent or not), by name; `"optimizer"`:
        its state dict, or a list of those of several; and `"extra"`: what modules return from
        `get_extra_state`, by module name.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> tree = state_of(model, torch.optim.SGD(model.parameters()))
        >>> list(tree), list(tree["model"])
        (['model', 'optimizer', 'extra'], ['weight', 'bias'])
    """
    return {
        "model": tensors_of(model),
        "optimizer": _optimizer_state(optimizer),
        "extra": {name: module.get_extra_state() for name, module in _with_extra(model)},
    }


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters, then all buffers, by name: `state_of`'s `"model"`."""
    return {name: tensor.detach() for name, tensor in _tensors(model)}


def load_state(model: nn.Module, optimizer: AnyOptimizer, tree: Mapping[str, Any]) -> None:
    """Give a model and its optimizer the state that `state_of` returned.

    Parameters and buffers are copied in place, so whoever holds them (DDP, the optimizer) sees
    the new values; those that are in the tree themselves cost nothing. The optimizer takes over
    the tree's tensors, in their own dtype, which may differ from the parameters'. State that it
    had and the tree has not is dropped.

    Args:
        model: built by the same code as the model whose state it is.
        optimizer: the model's optimizer, or several.
        tree: returned by `state_of`, `receive_state` or `CheckpointStore.load`.

    Raises:
        StateError: the tree is another model's or optimizer's. Nothing has changed then.
    """
    own = dict(_tensors(model))
    _check_model(own, tree["model"])
    pairs = _matched(optimizer, tree["optimizer"])
    for one, state in pairs:
        _load_optimizer(one, state)
    with torch.no_grad():
        for name, tensor in own.items():
            part, saved = local_of(tensor), local_of(tree["model"][name])
            if saved.data_ptr() != part.data_ptr():
                part.copy_(saved)
    for name, module in _with_extra(model):
        module.set_extra_state(tree["extra"][name])


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _with_extra(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have extra state of their own kind."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def _check_model(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Refuse a state whose names, shapes or dtypes are not the model's."""
    if own.keys() != saved.keys():
        differing = ", ".join(sorted(own.keys() ^ saved.keys())[:5])
        raise StateError(f"the state is another model's, one of the two lacks {differing}")
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
            raise StateError(
                f"model.{name} is {tensor.dtype} {tuple(tensor.shape)} and the state has "
                f"{saved[name].dtype} {tuple(saved[name].shape)}: build the model as it was"
            )
        if local_of(tensor).shape != local_of(saved[name]).shape:
            raise StateError(
                f"model.{name} is split in another way than in the state: shard it alike for any "
                "number of workers"
            )


def _optimizer_state(optimizer: AnyOptimizer) -> Any:
    if isinstance(optimizer, Optimizers):
        return [_optimizer_state(one) for one in optimizer.members]
    return zero_state_of(optimizer) if is_zero(optimizer) else optimizer.state_dict()


def _matched(optimizer: AnyOptimizer, state: Any) -> list[tuple[Optimizer, Mapping[str, Any]]]:
    """Return each optimizer with its state; refuse states that are others'."""
    members = members_of(optimizer)
    states = state if isinstance(state, list) else [state]
    if len(states) != len(members) or isinstance(state, list) != isinstance(optimizer, Optimizers):
        raise StateError(
            f"the state is of {len(states)} optimizers and the session has {len(members)}: give it "
            "as many as before, in a list if they were in one"
        )
    for one, saved in zip(members, states, strict=True):
        sizes = [len(group["params"]) for group in one.param_groups]
        found = [len(group["params"]) for group in saved["param_groups"]]
        if sizes != found:
            raise StateError(
                f"the state is another optimizer's: it has groups of {found} parameters, and this "
                f"{type(one).__name__} has {sizes}"
            )
    return list(zip(members, states, strict=True))


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state, undoing that torch casts it to the parameters' dtype.

    Tensors among the options, such as the lr, stay the same objects: a compiled step holds them.
    """
    options = [dict(group) for group in optimizer.param_groups]
    if is_zero(optimizer):
        load_zero_state(optimizer, state)
    else:
        optimizer.load_state_dict(dict(state))
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(_in_place(group, own))
    for index, parameter in _numbered(optimizer, state):
        own = optimizer.state.get(parameter, {})
        for name, saved in state["state"].get(index, {}).items():
            if isinstance(saved, torch.Tensor) and name in own:
                own[name] = _fitted(saved, to=own[name], parameter=parameter)


def _in_place(loaded: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the own tensors among a group's options, with the loaded values."""
    return {
        name: own[name].copy_(value)
        for name, value in loaded.items()
        if isinstance(value, torch.Tensor) and _is_alike(own.get(name), value)
    }


def _is_alike(own: object, value: torch.Tensor) -> bool:
    return isinstance(own, torch.Tensor) and (own.shape, own.dtype) == (value.shape, value.dtype)


def _numbered(optimizer: Optimizer, state: Mapping[str, Any]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the number under which the state knows a parameter, and the parameter."""
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        yield from zip(saved["params"], own["params"], strict=True)


def _fitted(saved: torch.Tensor, *, to: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a saved tensor on the device that torch chose, in its dtype, laid out as the weight.

    torch's foreach kernels fall back to slow ones where the strides differ.
    """
    if saved.shape != parameter.shape or saved.stride() == parameter.stride():
        return saved.to(to.device)
    laid_out = torch.empty_like(parameter, dtype=saved.dtype, device=to.device, requires_grad=False)
    return laid_out.copy_(saved)
