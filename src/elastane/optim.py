"""The scaled step: the user's optimizers under a scaled learning rate.

They stay the user's: nothing is patched, subclassed or stored. Knows nothing of gradients, data or
workers; what factor and how much progress, others decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from elastane import _compat
from elastane.errors import ArgumentError, UnsupportedError, describe
from elastane.follow import Follow
from elastane.follower import Follower
from elastane.optimizers import AnyOptimizer, members_of
from elastane.schedule import Schedule, set_lr
from elastane.zero import own_state

__all__ = [
    "ScaledStep",
    "clip_coefficient",
    "clip_gradients",
    "momentum_of",
    "scale_momentum",
    "scaled_lr",
]


@contextmanager
def scaled_lr(optimizer: AnyOptimizer, factors: Sequence[float]) -> Iterator[None]:
    """Multiply each group's learning rate for the length of a block.

    The learning rate is put back to the bit, also when the block raises; a tensor lr is changed
    and restored in place.

    Args:
        optimizer: any torch optimizer, or several.
        factors: one for every parameter group, or a single one for all.

    Raises:
        ArgumentError: different factors for groups that share one tensor as their lr.
    """
    groups = optimizer.param_groups
    each = _one_a_group(factors, optimizer)
    _check_shared_lrs(groups, each)
    saved = [g["lr"].clone() if isinstance(g["lr"], Tensor) else g["lr"] for g in groups]
    try:
        for group, lr, factor in zip(groups, saved, each, strict=True):
            set_lr(group, lr * factor)
        yield
    finally:
        for group, lr in zip(groups, saved, strict=True):
            set_lr(group, lr)


def _one_a_group(factors: Sequence[float], optimizer: AnyOptimizer) -> list[float]:
    return list(factors) * len(optimizer.param_groups) if len(factors) == 1 else list(factors)


def _check_shared_lrs(groups: Sequence[Mapping[str, Any]], factors: Sequence[float]) -> None:
    seen: dict[int, float] = {}
    for group, factor in zip(groups, factors, strict=False):
        lr = group["lr"]
        if isinstance(lr, Tensor) and seen.setdefault(id(lr), factor) != factor:
            rule = "differ between parameter groups that share one tensor as their lr"
            way_out = "Give each group a tensor of its own."
            raise ArgumentError(describe("factors", list(factors), rule=rule, way_out=way_out))


def momentum_of(optimizer: AnyOptimizer) -> float:
    """Return the largest momentum of the groups: `momentum`, or `betas[0]`; 0 if none has any."""
    return max(_momentum(group) for group in optimizer.param_groups)


def _momentum(group: Mapping[str, Any]) -> float:
    betas = group.get("betas")
    return float(betas[0] if betas else group.get("momentum", 0.0))


def scale_momentum(optimizer: AnyOptimizer, factors: Sequence[float]) -> None:
    """Multiply the momentum buffers that hold gradients, those called `momentum_buffer`, in place.

    Args:
        optimizer: any torch optimizer, or several.
        factors: one for every parameter group, or a single one for all.
    """
    if all(factor == 1 for factor in factors):
        return
    each = iter(_one_a_group(factors, optimizer))
    for one in members_of(optimizer):
        state = own_state(one)
        for group in one.param_groups:
            found = [state[p].get("momentum_buffer") for p in group["params"] if p in state]
            buffers = [buffer for buffer in found if buffer is not None]
            factor = next(each)
            if buffers and factor != 1:
                _compat.foreach_mul_(buffers, factor)


def clip_coefficient(*, max_norm: float, grad_norm: float) -> float:
    """Return `min(1, max_norm / (|g| + 1e-6))`, as in `torch.nn.utils.clip_grad_norm_`."""
    return min(1.0, max_norm / (grad_norm + 1e-6))


def clip_gradients(optimizer: AnyOptimizer, *, coefficient: float) -> None:
    """Scale the gradients down by a coefficient that is known already."""
    if coefficient < 1:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        _compat.foreach_mul_([p.grad for p in parameters if p.grad is not None], coefficient)


def _has_gradients(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has anything to step by."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


class ScaledStep:
    """Steps the user's optimizer under `lr = schedule(progress) * factor`.

    Args:
        optimizer: the user's optimizer, or several.
        schedule: the schedule to move.
        custom: makes the optimizer's step in its place, such as a compiled `optimizer.step`; of
            several, the steps of all.
        follow: what besides the learning rate follows the batch.

    Example:
        >>> import torch
        >>> from elastane.schedule import Schedule
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> schedule = Schedule(lambda tau: 1 - tau / 10, optimizer=optimizer, num_steps=10)
        >>> weight.grad = torch.ones(1)
        >>> ScaledStep(optimizer, schedule).step([2.0], progress=2.0)
        >>> weight.item(), optimizer.param_groups[0]["lr"]
        (0.0, 0.4)
    """

    def __init__(
        self,
        optimizer: AnyOptimizer,
        schedule: Schedule,
        *,
        custom: Callable[..., Any] | None = None,
        follow: Follow = Follow(),
    ) -> None:
        self._optimizer = optimizer
        self.follower = Follower(optimizer, follow)
        self._schedule = schedule
        self._custom = custom

    def step(
        self,
        factors: Sequence[float],
        *,
        progress: float,
        worth: float = 1.0,
        scale: float = 1.0,
        prepare: Callable[[], None] = lambda: None,
        scaler: GradScaler | None = None,
        closure: Callable[[], float] | None = None,
    ) -> Any:
        """Step the optimizer once, then move the schedule.

        Args:
            factors: one for every parameter group, or a single one for all.
            progress: `tau` after this step.
            worth: what of it is this step's.
            scale: `S`, of the batch that the policy asks for.
            prepare: called when learning rates, and what follows, are those of the step.
            scaler: a gradient scaler whose `unscale_` has been called. A custom step is made
                without asking it: the gradients must be finite.
            closure: handed to the optimizer.

        Returns:
            What the optimizer's `step` returned; the last one's of several.
        """
        multiplier = self._schedule.multiplier_at(progress)
        with ExitStack() as stack:
            stack.enter_context(scaled_lr(self._optimizer, factors))
            stack.enter_context(
                self.follower.stepping(scale=scale, factors=factors, progress=worth)
            )
            if scaler is not None and closure is not None:
                raise UnsupportedError("a closure can't be combined with a scaler: leave one out")
            prepare()
            result = self._step(scaler, closure)
        self._schedule.move(progress, multiplier=multiplier)
        return result

    def repeat(self) -> None:
        """Step the optimizer by the gradients and the numbers that its groups have now."""
        self._step(None, None)

    def _step(self, scaler: GradScaler | None, closure: Callable[[], float] | None) -> Any:
        members, result = members_of(self._optimizer), None
        if self._custom is not None:
            result = self._custom() if closure is None else self._custom(closure)
            for one in members:
                _compat.note_step(one)
        elif scaler is None:
            for one in members:
                result = one.step() if closure is None else one.step(closure)
        else:
            for one in members:
                if _has_gradients(one):  # a scaler knows nothing of the others
                    result = scaler.step(one)
        return result
