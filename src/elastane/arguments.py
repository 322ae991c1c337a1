"""What a session is given, checked before anything is changed.

Free functions; each names the argument, the value, the rule and the way out.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import LBFGS, Optimizer

from elastane.batching import BatchPolicy
from elastane.data import LoaderOptions
from elastane.durability import Checkpointing
from elastane.errors import (
    ArgumentError,
    UnsupportedError,
    check_positive,
    check_whole,
    describe,
)
from elastane.follow import Follow
from elastane.measuring import Measuring
from elastane.optimizers import AnyOptimizer, Optimizers, joined, members_of
from elastane.scaling import AdaScale

__all__ = [
    "base_steps",
    "check_loss",
    "check_optimizer",
    "check_session",
    "checked_weight",
    "parameter_groups",
]


def base_steps(
    num_steps: float | None, *, num_epochs: float | None, num_samples: int, base: int
) -> float:
    """Return the length of the run in base steps, given either way.

    An epoch at the base batch takes `ceil(num_samples / base)` steps, as a plain loop over a
    `DataLoader` of that batch would.
    """
    if num_epochs is None:
        way_out = "Base steps for which the schedule was tuned, or num_epochs instead."
        return check_positive("num_steps", num_steps, way_out=way_out)
    if num_steps is not None:
        rule, way_out = f"given together with num_epochs={num_epochs!r}", "Pass one of them."
        raise ArgumentError(describe("num_steps", num_steps, rule=rule, way_out=way_out))
    check_positive("num_epochs", num_epochs, way_out="Epochs of the run, or num_steps instead.")
    return num_epochs * -(-num_samples // base)


def check_session(given: Mapping[str, Any]) -> None:
    """Refuse arguments of a session that are of another kind than it takes.

    Args:
        given: the arguments by name.
    """
    check_kind("model", given["model"], nn.Module, way_out="Pass the bare module.")
    way_out = "For example torch.optim.SGD(model.parameters(), lr=0.1)."
    optimizer = given["optimizer"]
    check_kind("optimizer", optimizer, (Optimizer, list, tuple), way_out=way_out)
    if not isinstance(optimizer, Optimizer):
        _check_members(optimizer)
    check_optimizer(joined(optimizer), given["model"])
    way_out = "Pass the batch size for which the learning rate was tuned."
    check_whole("base_batch_size", given["base_batch_size"], at_least=1, way_out=way_out)
    check_function("rule", given["rule"], way_out="For example elastane.AdaScale().")
    batch = given["batch"]
    if batch is not None and (isinstance(batch, type) or not isinstance(batch, BatchPolicy)):
        rule, way_out = "must be a batch policy", "For example elastane.LocalBatch(64)."
        raise ArgumentError(describe("batch", batch, rule=rule, way_out=way_out))
    if given["compensation"] is not None:
        way_out = "For example elastane.MomentumRamp(), or None."
        check_function("compensation", given["compensation"], way_out=way_out)
    if given["step"] is not None:
        way_out = "For example torch.compile(optimizer.step), or None."
        check_function("step", given["step"], way_out=way_out)
    if given["shard"] is not None:
        way_out = "A function of (model, mesh) that calls fully_shard, or None."
        check_function("shard", given["shard"], way_out=way_out)
    kinds = {
        "measuring": (Measuring, "For example elastane.Measuring(every=4)."),
        "loader": (LoaderOptions, "For example elastane.LoaderOptions(num_workers=2)."),
        "follow": (Follow, "For example elastane.Follow(weight_decay=True)."),
        "scaler": ((GradScaler, type(None)), 'For example torch.amp.GradScaler("cuda").'),
        "checkpoint": (
            (Checkpointing, type(None)),
            "For example elastane.Checkpointing(every_s=60).",
        ),
        "ddp": ((Mapping, type(None)), 'For example {"find_unused_parameters": True}.'),
        "stateful": (Mapping, 'For example {"ema": averaged_model}.'),
        "sinks": (Sequence, "A list of sinks; see elastane.telemetry."),
    }
    for name, (kind, way_out) in kinds.items():
        check_kind(name, given[name], kind, way_out=way_out)
    for name, one in given["stateful"].items():
        if not isinstance(one, Stateful):
            rule = "must have state_dict() and load_state_dict(state)"
            way_out = "Pass an object such as a torchmetrics metric or an averaged model."
            raise ArgumentError(describe(f"stateful[{name!r}]", one, rule=rule, way_out=way_out))
    if isinstance(given["rule"], AdaScale) and not given["follow"].takes_squares:
        _warn_of_adam(joined(optimizer))


def check_kind(name: str, value: object, kind: type | tuple[type, ...], *, way_out: str) -> None:
    """Refuse a value of another type."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        rule = "must be " + " or ".join(f"a {one.__name__}" for one in kinds)
        raise ArgumentError(describe(name, value, rule=rule, way_out=way_out))


def check_function(name: str, value: object, *, way_out: str) -> None:
    """Refuse what is no function or object to call; a class is taken for a forgotten `()`."""
    if isinstance(value, type) or not callable(value):
        rule = "must be an object that can be called, not a class"
        raise ArgumentError(describe(name, value, rule=rule, way_out=way_out))


def _check_members(optimizers: Sequence[Any]) -> None:
    """Refuse a sequence of anything but different optimizers."""
    for number, one in enumerate(optimizers):
        way_out = "For example [SGD(...), AdamW(...)], each with parameters of its own."
        check_kind(f"optimizer[{number}]", one, Optimizer, way_out=way_out)
    if not optimizers or len({id(one) for one in optimizers}) < len(optimizers):
        rule, way_out = "must be at least one, all different", "Pass each optimizer once."
        raise ArgumentError(describe("optimizer", optimizers, rule=rule, way_out=way_out))


def check_optimizer(optimizer: AnyOptimizer, model: nn.Module) -> None:
    """Refuse parameters that the model does not have, and optimizers that want a closure.

    So are parameters of two optimizers: each of both would step them.
    """
    known, taken = {id(parameter) for parameter in model.parameters()}, set[int]()
    several = isinstance(optimizer, Optimizers)
    for number, one in enumerate(members_of(optimizer)):
        if isinstance(one, LBFGS):
            raise UnsupportedError(
                "LBFGS computes the loss several times a step and is not supported: use another "
                "optimizer"
            )
        name = f"optimizer[{number}]" if several else "optimizer"
        _check_parameters(one, name=name, known=known, taken=taken)
        taken |= {id(p) for group in one.param_groups for p in group["params"]}


def _check_parameters(optimizer: Optimizer, *, name: str, known: set[int], taken: set[int]) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            rule = way_out = ""
            if id(parameter) not in known:
                rule = "is no parameter of the model, so its gradient would not be averaged"
                way_out = "Build the optimizer on model.parameters() of the model passed here."
            elif id(parameter) in taken:
                rule = "has an optimizer already, so both would step it"
                way_out = "Give each parameter to one of them."
            if rule:
                where = f"{name}.param_groups[{number}]['params'][{place}]"
                value = _shape_of(parameter)
                raise ArgumentError(describe(where, value, rule=rule, way_out=way_out))


def _warn_of_adam(optimizer: AnyOptimizer) -> None:
    for one in members_of(optimizer):
        if any("betas" in group for group in one.param_groups):
            warnings.warn(
                f"AdaScale is made for SGD, and the optimizer is {type(one).__name__}: "
                "elastane.AdamScale() takes the square root of the gain",
                stacklevel=5,
            )


def parameter_groups(optimizer: AnyOptimizer, *, per: str) -> Sequence[Sequence[Tensor]]:
    """Return the parameters of each group with statistics of its own: one in all, or each."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    return groups if per == "param_group" else [[p for group in groups for p in group]]


def check_loss(loss: object) -> None:
    """Refuse what is no loss to run backward on."""
    if not isinstance(loss, Tensor):
        rule, way_out = "must be a tensor", "Pass what your loss function returned."
        raise ArgumentError(describe("loss", loss, rule=rule, way_out=way_out))
    if loss.numel() != 1:
        rule, way_out = "must be a scalar", "Take its mean over the micro-batch."
        raise ArgumentError(describe("loss", _shape_of(loss), rule=rule, way_out=way_out))
    if not loss.requires_grad:
        rule = "has no gradient to run backward for"
        way_out = "Compute it from session.model's output, with gradients on and not detached."
        raise ArgumentError(describe("loss", _shape_of(loss), rule=rule, way_out=way_out))


def _shape_of(tensor: Tensor) -> str:
    return f"tensor of shape {tuple(tensor.shape)}"


def checked_weight(weight: object) -> float:
    """Return the weight of a micro-batch's mean loss; refuse one that can't be."""
    if isinstance(weight, (int, float)) and math.isfinite(weight) and weight >= 0:
        return float(weight)
    rule, way_out = "must be a finite number of at least 0", "Number of tokens, for example."
    raise ArgumentError(describe("weight", weight, rule=rule, way_out=way_out))
