"""Optimizers that divide by the root of a second moment: Adam and its kin, seen from outside.

Knows torch's optimizers and the names that their state has; nothing of steps, batches or workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, RMSprop

from elastane.errors import ArgumentError, describe
from elastane.follow import Follow
from elastane.optimizers import AnyOptimizer, members_of
from elastane.zero import own_state

__all__ = [
    "base_excess",
    "check_follow",
    "preconditioners",
    "raise_second_moments",
]

_SECOND = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum")
_OWN_WAY = "Leave it out; the learning rate follows in any case."


def preconditioners(
    optimizer: AnyOptimizer, *, weights: Sequence[float] | None = None
) -> dict[int, Tensor]:
    """Return `1 / (sqrt v + eps)` by the parameters' ids, as far as there are second moments.

    `v` is corrected for its start where the optimizer counts steps. Adam multiplies its average of
    gradients by this, element by element, so it is by this that it sees noise and signal.

    Args:
        optimizer: any torch optimizer, or several; the state is looked up by the names that
            torch's Adam, RMSprop and Adagrad, and their kin, give it.
        weights: what each group's `v` is to be divided by, where its beta was not always the same.
    """
    found: dict[int, Tensor] = {}
    each = iter(weights or ())
    for one in members_of(optimizer):
        state = own_state(one)
        for group in one.param_groups:
            eps, betas, known = group.get("eps", 0.0), group.get("betas"), next(each, None)
            for parameter in group["params"]:
                moment = _second_moment(state.get(parameter, {}), like=parameter)
                if moment is None:
                    continue
                steps = state[parameter].get("step", group.get("step"))
                weight = known or 1.0
                if known is None and betas is not None and steps is not None:
                    weight = 1 - betas[1] ** float(steps)
                root = moment.sqrt() if weight == 1 else moment.div(weight).sqrt_()
                found[id(parameter)] = root.add_(eps).reciprocal_()
    return found


def _second_moment(state: Mapping[str, Any], *, like: Tensor) -> Tensor | None:
    for name in _SECOND:
        moment = state.get(name)
        if isinstance(moment, Tensor) and moment.shape == like.shape:
            return moment
    return None


def check_follow(follow: Follow, optimizer: AnyOptimizer) -> None:
    """Refuse what an optimizer has not, or has in a way that is not known.

    Raises:
        ArgumentError: `betas` of another than Adam, AdamW or RMSprop; `eps` of one without; a
            weight decay that is part of the gradient; the base batch's second moment of another
            than Adam or AdamW.
    """
    for one in members_of(optimizer):
        name, groups = type(one).__name__, one.param_groups
        if follow.betas != "keep" and not isinstance(one, Adam | RMSprop):
            rule = f"averages can be followed of Adam, AdamW and RMSprop, not of {name}"
            raise ArgumentError(describe("follow.betas", follow.betas, rule=rule, way_out=_OWN_WAY))
        if follow.eps and any("eps" not in group for group in groups):
            rule = f"{name} has no eps"
            raise ArgumentError(describe("follow.eps", follow.eps, rule=rule, way_out=_OWN_WAY))
        if follow.weight_decay and not all(map(_is_decoupled, groups)):
            rule = f"the weight decay of {name} is part of the gradient, which is scaled already"
            way_out = "Take AdamW, or leave it out."
            value = follow.weight_decay
            raise ArgumentError(describe("follow.weight_decay", value, rule=rule, way_out=way_out))
        if follow.takes_squares and not (isinstance(one, Adam) and all(map(_averages, groups))):
            rule = f"is known for Adam and AdamW with betas above 0, not for {name}"
            value = follow.second_moment
            raise ArgumentError(
                describe("follow.second_moment", value, rule=rule, way_out='Leave it at "keep".')
            )


def _averages(group: Mapping[str, Any]) -> bool:
    return group["betas"][1] > 0


def _is_decoupled(group: Mapping[str, Any]) -> bool:
    is_decoupled = group.get("decoupled_weight_decay") or group.get("weight_decouple")
    return bool(is_decoupled) or group.get("weight_decay", 0) == 0


def base_excess(
    sqr_sum: Tensor,
    mean: Tensor,
    *,
    batch_samples: float,
    num_gradients: int,
    base_batch_size: float,
) -> Tensor:
    r"""Return how much larger squares are in a base batch's gradient, element by element.

    With `n` gradients `g_i`, each the mean over `b_i` samples, and their mean `g` over `B`, the
    variance of a sample's gradient is estimated by `s = (sum b_i g_i^2 - B g^2) / (n - 1)`, and::

        E[g_base^2] - E[g^2] = s (1 / B0 - 1 / B)

    With `n = S` micro-batches of `B0` this added to `g^2` is the mean of their squares, the
    second moment of batch-size-invariant Adam. Below 0 for `B` below `B0`, but not below `-g^2`.

    Args:
        sqr_sum: `sum b_i g_i^2`.
        mean: `g`.
        batch_samples: `B`.
        num_gradients: `n`, at least 2.
        base_batch_size: `B0`.

    References:
        Wang and Aitchison, Batch size invariant Adam (arXiv 2402.18824, 2024), for `b_i = B0`;
        the form for any split is ours, as in `elastane.noise.estimate_moments`.
    """
    square = mean.square()
    variance = (sqr_sum - batch_samples * square).div_(num_gradients - 1).clamp_(min=0)
    excess = variance.mul_(1 / base_batch_size - 1 / batch_samples)
    return excess if batch_samples >= base_batch_size else torch.maximum(excess, -square)


def raise_second_moments(
    optimizer: AnyOptimizer,
    sqr_sums: Mapping[int, Tensor],
    *,
    factor: float | Tensor,
    batch_samples: float,
    num_gradients: int,
    base_batch_size: float,
) -> None:
    """Make the step that comes average the squares of base batches: `g^2 + base_excess`.

    Adam will do `v <- b2 v + (1 - b2) g^2`, so `v` is raised by `(1 - b2) / b2` times the excess
    first.

    Args:
        optimizer: Adam or AdamW, with the gradients and betas of the step.
        sqr_sums: `sum b_i g_i^2`, by the parameters' ids,
        factor: and what they are to be multiplied by: gradients may be clipped, or were scaled.
        batch_samples: `B`.
        num_gradients: `n`, at least 2.
        base_batch_size: `B0`.
    """
    for one in members_of(optimizer):
        _make_state(one)
        state = own_state(one)
        for group in one.param_groups:
            beta = group["betas"][1]
            for parameter in group["params"]:
                if parameter.grad is None or parameter not in state:
                    continue
                excess = base_excess(
                    sqr_sums[id(parameter)] * factor,
                    parameter.grad,
                    batch_samples=batch_samples,
                    num_gradients=num_gradients,
                    base_batch_size=base_batch_size,
                )
                state[parameter]["exp_avg_sq"].add_(excess, alpha=(1 - beta) / beta)


def _make_state(optimizer: Any) -> None:
    """Let an optimizer make its state, which it does in its first step, and count from 0."""
    state = own_state(optimizer)
    fresh = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and parameter not in state
    ]
    if not fresh:
        return
    gradients = {
        parameter: parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in gradients:
        parameter.grad = torch.zeros_like(parameter) if parameter in set(fresh) else None
    try:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
    for parameter in fresh:
        if parameter in state:
            state[parameter]["step"].zero_()
