"""What the Lightning strategy puts in the Trainer's way: a stream of batches, and a forward.

Knows a DataLoader's size and a module's methods; nothing of sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

__all__ = ["Stream", "forwarding"]


class Stream:
    """What the Trainer iterates over in the DataLoader's place: the session's steps, without end.

    Its length is an epoch's, in base steps.
    """

    def __init__(self, loader: DataLoader[Any], *, take: Callable[[], Any]) -> None:
        self.dataset, self._length = loader.dataset, len(loader)
        assert loader.batch_size is not None
        self.batch_size = loader.batch_size
        self._take = take

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._take()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, and so tell the Trainer that it goes on in the middle of an epoch.

        The session's state says where.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


@contextmanager
def forwarding(module: LightningModule) -> Iterator[None]:
    """Have a module's `forward`, which DDP calls, be its `training_step` in a block.

    Within `training_step` it is itself again. Lightning's own redirection is over once the step
    has failed; a session that runs the step again, without DDP, would then run `forward`.
    """
    forward, own = module.forward, vars(module).get("forward")

    def redirected(*args: Any, **kwargs: Any) -> Any:
        module.forward = forward
        try:
            return module.training_step(*args, **kwargs)
        finally:
            module.forward = redirected

    module.forward = redirected
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
