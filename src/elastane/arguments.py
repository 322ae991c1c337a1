"""What a session is given, checked before anything is changed.

Free functions; each names the argument, the value, the rule and the way out.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from elastane.errors import ArgumentError, check_positive, check_whole, describe

__all__ = ["base_steps", "check_base_batch_size", "check_optimizer", "parameter_groups"]


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


def check_base_batch_size(value: object) -> int:
    """Return the base batch, or refuse it."""
    way_out = "Pass the batch size for which the learning rate was tuned."
    return check_whole("base_batch_size", value, at_least=1, way_out=way_out)


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse parameters that the model does not have."""
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
