"""What a session is given, checked before anything is changed.

Free functions; each names the argument, the value, the rule and the way out.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import LBFGS, Optimizer

from elastane.batching import BatchPolicy
from elastane.controller import Measuring
from elastane.data import LoaderOptions
from elastane.durability import Checkpointing
from elastane.errors import (
    ArgumentError,
    UnsupportedError,
    check_positive,
    check_whole,
    describe,
)
from elastane.scaling import AdaScale

__all__ = ["base_steps", "check_optimizer", "check_session", "parameter_groups"]


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
    check_kind("optimizer", given["optimizer"], Optimizer, way_out=way_out)
    check_optimizer(given["optimizer"], given["model"])
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
    if isinstance(given["rule"], AdaScale) and any(
        "betas" in g for g in given["optimizer"].param_groups
    ):
        warnings.warn(
            f"AdaScale is made for SGD, and the optimizer is {type(given['optimizer']).__name__}: "
            "elastane.AdamScale() takes the square root of the gain",
            stacklevel=4,
        )


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


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse parameters that the model does not have, and optimizers that want a closure."""
    if isinstance(optimizer, LBFGS):
        raise UnsupportedError(
            "LBFGS computes the loss several times a step and is not supported: use another "
            "optimizer"
        )
    known = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                name = f"optimizer.param_groups[{number}]['params'][{place}]"
                value = f"tensor of shape {tuple(parameter.shape)}"
                rule = "is no parameter of the model, so its gradient would not be averaged"
                way_out = "Build the optimizer on model.parameters() of the model passed here."
                raise ArgumentError(describe(name, value, rule=rule, way_out=way_out))


def parameter_groups(optimizer: Optimizer, *, per: str) -> Sequence[Sequence[Tensor]]:
    """Return the parameters of each group with statistics of its own: one in all, or each."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    return groups if per == "param_group" else [[p for group in groups for p in group]]
