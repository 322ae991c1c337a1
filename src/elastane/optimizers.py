"""Several torch optimizers that step together, held as one.

Knows torch's optimizers; nothing of learning rates, gradients or what a step is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from elastane.errors import UnsupportedError

__all__ = ["AnyOptimizer", "Optimizers", "joined", "members_of"]


class Optimizers:
    """Optimizers of one training, each with parameters of its own, in a fixed order.

    Args:
        members: at least one.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = tuple(members)
        self._sizes = [len(one.param_groups) for one in self.members[:-1]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The members' own groups, one member's after the other's.

        Raises:
            UnsupportedError: a group joined in the middle, where all groups behind it would be
                taken for the ones before.
        """
        sizes = [len(one.param_groups) for one in self.members[:-1]]
        if sizes != self._sizes:
            raise UnsupportedError(
                f"a parameter group was added to an optimizer of several: the first {len(sizes)} "
                f"had {self._sizes} groups and have {sizes}; add it to the last one, or build all "
                "groups before the session"
            )
        return [group for one in self.members for group in one.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters."""
        for one in self.members:
            one.zero_grad(set_to_none=set_to_none)


AnyOptimizer = Optimizer | Optimizers
"""What a training's parameters are stepped by."""


def joined(optimizer: Optimizer | Sequence[Optimizer]) -> AnyOptimizer:
    """Return a user's optimizer, or several of them as one."""
    return optimizer if isinstance(optimizer, Optimizer) else Optimizers(optimizer)


def members_of(optimizer: AnyOptimizer) -> tuple[Optimizer, ...]:
    """Return the torch optimizers, at least one."""
    return optimizer.members if isinstance(optimizer, Optimizers) else (optimizer,)
