"""The loss scale of a step: what the loss and its gradients are multiplied by, and who divides.

Knows torch's GradScaler and the two taps; nothing of decisions, models or workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from elastane import _compat
from elastane.errors import UsageError
from elastane.gradients import GradientTap
from elastane.optimizers import AnyOptimizer, members_of
from elastane.sharded import ShardedTap
from elastane.step_sums import Extra

__all__ = ["GradScaling"]


class GradScaling:
    """A user's gradient scaler in the session's hands; without one all scales are 1.

    Args:
        scaler: gradient scaler, or `None`.
        optimizer: whose gradients it unscales; one or several.
    """

    def __init__(self, scaler: GradScaler | None, optimizer: AnyOptimizer) -> None:
        self.scaler = scaler
        self._optimizers = members_of(optimizer)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to run backward on."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    @property
    def loss_scale(self) -> Extra:
        """What losses are multiplied by; 1 where none was scaled yet."""
        scale = None if self.scaler is None else _compat.loss_scale(self.scaler)
        return 1.0 if scale is None else scale

    def scale_at(self, tap: GradientTap | ShardedTap, *, in_backward: bool) -> Extra:
        """Return what a window's gradients are multiplied by, which a tap is about to settle.

        Those that the user has unscaled are taken as they are.

        Args:
            tap: holds the gradients.
            in_backward: whether backward has just ended, so that nobody can have unscaled them.

        Raises:
            UsageError: a part of their norms was taken before that, or only some optimizers' were
                unscaled; or no loss was scaled.
        """
        if self.scaler is None or tap.is_settled:
            return 1.0
        unscaled = [not in_backward and self._is_unscaled(one) for one in self._optimizers]
        is_unscaled = any(unscaled)
        if is_unscaled and (_minds_unscaling(tap) or not all(unscaled)):
            raise UsageError(_UNSCALED_TOO_EARLY)
        if is_unscaled and tap.is_alone:
            return 1.0
        scale = _compat.loss_scale(self.scaler)
        if scale is None:
            raise UsageError(_NEVER_SCALED)
        return scale

    def unscale(self) -> None:
        """Divide the gradients by the scale, unless that was done."""
        for one in self._optimizers:
            if self.scaler is not None and not self._is_unscaled(one):
                self.scaler.unscale_(one)

    def _is_unscaled(self, optimizer: Optimizer) -> bool:
        return self.scaler is not None and _compat.is_unscaled(self.scaler, optimizer)

    def update(self, *, finite: bool) -> None:
        """Move the scale at the end of a step.

        Args:
            finite: whether the gradients of all workers were; if not, the scale backs off.
        """
        if self.scaler is not None:
            for one in () if finite else self._optimizers:
                _compat.note_overflow(self.scaler, one)
            self.scaler.update()

    def forget(self) -> None:
        """Take the next gradients for scaled ones."""
        for one in self._optimizers:
            if self.scaler is not None:
                _compat.forget_unscaling(self.scaler, one)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state by its name, if there is one."""
        return {} if self.scaler is None else {"scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the scaler's state, if there is one."""
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(dict(state["scaler"]))


def _minds_unscaling(tap: GradientTap | ShardedTap) -> bool:
    """Return whether a part of the window's norms was taken of scaled gradients already."""
    return isinstance(tap, ShardedTap) or (tap.is_alone and tap.has_set_aside)


_NEVER_SCALED = (
    "the session has a scaler and no loss was scaled: use session.backward(loss), which scales, "
    "or scaler.scale(loss).backward()"
)
_UNSCALED_TOO_EARLY = (
    "scaler.unscale_() was called before the gradients of the window were measured and put "
    "together, or for some optimizers only: use session.backward(loss), which puts them together, "
    "instead of loss.backward(), and unscale behind it"
)
