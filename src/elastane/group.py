"""The workers as a worker sees them: what a membership must do, and the group that it works with.

Knows process groups and DDP; nothing of steps, data or schedules, nor of who decides on members.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from elastane import replica
from elastane.batching import World
from elastane.errors import CommunicationError, StateError
from elastane.gradients import GradientTap

__all__ = [
    "Membership",
    "Trainee",
    "Wrapping",
    "as_communication_error",
    "backend_of",
    "check_agreement",
    "digest_of",
    "sum_over_workers",
]

T = TypeVar("T")


class Trainee(Protocol):
    """What a membership asks of the training that it holds together."""

    @property
    def step(self) -> int:
        """Committed steps."""
        ...

    def identity(self) -> Mapping[str, object]:
        """Return what makes it this run: the same on all workers."""
        ...

    def facts(self) -> Mapping[str, object]:
        """Return where it stands; the same on all workers that start together."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all that another worker needs to go on in its place."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from another worker's state."""
        ...

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors at the head of `state_dict` that may be overwritten in place."""
        ...

    def entered(self, world: World, *, cause: str) -> None:
        """Know that this worker takes part in another group from now on."""
        ...

    def settled(self, step: int) -> None:
        """Know that committed steps up to this one are final, and that no later one is."""
        ...

    def save(self) -> None:
        """Write a durable checkpoint now, if the run keeps any."""
        ...

    def resume(self) -> None:
        """Go on from the newest durable checkpoint, if there is one."""
        ...

    def left(self) -> None:
        """Know that this worker takes part no longer, while the run goes on."""
        ...

    def status(self) -> Mapping[str, Any]:
        """Return numbers for people: step, progress, lr and the like. Any thread may call it."""
        ...


class Membership(Protocol):
    """Who takes part, from one worker's point of view.

    A *turn* is what all workers do together: a step, an evaluation, the agreement on the end.
    After a change of members all stand behind the same turn, and hold the same state.
    """

    @property
    def world(self) -> World:
        """This worker's place."""
        ...

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The present process group; `None` while this worker is alone."""
        ...

    @property
    def warming(self) -> bool:
        """Whether the window at work is a rehearsal before this worker takes part."""
        ...

    def joined(self, trainee: Trainee) -> AbstractContextManager[None]:
        """Take part for the length of a block."""
        ...

    @property
    def final_at_once(self) -> bool:
        """Whether a step that this worker has committed can't be void later."""
        ...

    def rehearsed(self) -> None:
        """Take part from now on: the rehearsal is over."""
        ...

    def start_window(self) -> None:
        """Change members if it is time, and wrap the model anew if other parameters train."""
        ...

    def extras(self) -> Sequence[float]:
        """Return what is to be summed over the workers with each step, for `finished_step`."""
        ...

    def finished_step(self, sums: Sequence[float]) -> None:
        """End a turn that was a step; take the workers' sums of `extras`."""
        ...

    def recover(self, why: str) -> bool:
        """Go on after the group broke in a step.

        Returns:
            Whether others had ended the turn: then its outcome has come with the state.

        Raises:
            CommunicationError: this kind of membership can't.
        """
        ...

    def together(self, work: Callable[[], T]) -> T:
        """Return what a turn comes to that all workers do; start over if the group breaks."""
        ...

    def agree_on_end(self) -> None:
        """End the run for all workers at once, or find that some are not there yet."""
        ...

    def pause(self, reason: str) -> AbstractContextManager[None]:
        """Return a context for work that is not to be taken for a hang."""
        ...


class Wrapping:
    """The model's wrapper over the present group, and the gradient tap on it.

    Args:
        model: the module that users hold; it is told of every wrapper.
        tap: averages and measures the wrapper's gradients.
        ddp: further arguments of DDP.
    """

    def __init__(self, model: replica.Replica, *, tap: GradientTap, ddp: Mapping[str, Any]) -> None:
        self.model = model
        self._tap = tap
        self._ddp = dict(ddp)
        self._trainable: frozenset[int] = frozenset()
        self.group: dist.ProcessGroup | None = None

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.model.parameters()).device

    def use(self, group: dist.ProcessGroup | None, *, spread_weights: bool = True) -> None:
        """Average over a group from now on; a single worker's model stays bare.

        Args:
            group: the workers, or `None`.
            spread_weights: whether the workers may differ, so that rank 0's weights are for all.
        """
        self.drop()
        self.group = group
        if group is not None:
            self._wrap(group, spread_weights=spread_weights)

    def refresh(self) -> None:
        """Wrap again if other parameters of the model require gradients than when it was wrapped.

        DDP averages what required a gradient when it was made. All workers must freeze and
        unfreeze alike.
        """
        if self.group is not None and self._now_trainable() != self._trainable:
            self.merge_statistics()  # DDP would spread the buffers of rank 0
            self._unwrap()
            self._wrap(self.group, spread_weights=True)

    def merge_statistics(self, *, counted: bool = True) -> None:
        """Give all workers the same running statistics of BatchNorm.

        Args:
            counted: whether this worker's own statistics take part.
        """
        if self.group is not None:
            add_up = partial(sum_over_workers, group=self.group)
            replica.merge_batch_statistics(
                self.model.inner, sum_over_workers=add_up, counted=counted
            )

    def drop(self) -> None:
        """Let go of the group: nothing here refers to it, or to the wrapper, any longer."""
        self._unwrap()
        self.group = None

    def _now_trainable(self) -> frozenset[int]:
        return frozenset(id(p) for p in self.model.parameters() if p.requires_grad)

    def _wrap(self, group: dist.ProcessGroup, *, spread_weights: bool) -> None:
        options = {**self._ddp, "init_sync": spread_weights and self._ddp.get("init_sync", True)}
        wrapper = replica.wrap(self.model.inner, group=group, options=options)
        self._tap.attach(wrapper, group=group)
        self.model.use(wrapper, on_failure=self._tap.note_failure)
        self._trainable = self._now_trainable()

    def _unwrap(self) -> None:
        self.model.use(None)
        self._tap.detach()
        self._trainable = frozenset()


def backend_of(device: torch.device) -> str:
    """Return the communication backend for tensors on a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def check_agreement(
    facts: Mapping[str, object], *, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Compare named facts over the workers.

    Raises:
        StateError: on every worker, naming what differs.
        CommunicationError: the group broke.
    """
    own = torch.tensor([digest_of(value) for value in facts.values()], device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with as_communication_error():
        dist.all_gather(gathered, own, group=group)
    same = (torch.stack(gathered) == gathered[0]).all(0).tolist()
    differing = [name for name, is_same in zip(facts, same, strict=True) if not is_same]
    if differing:
        shown = ", ".join(f"{name}={facts[name]!r}" for name in differing)
        raise StateError(
            f"the workers differ in what must be the same on all; here {shown}: start all of them "
            "with the same arguments, and load the same saved state on each"
        )


def sum_over_workers(values: torch.Tensor, *, group: dist.ProcessGroup) -> None:
    """Add up a tensor over the workers, in place.

    Raises:
        CommunicationError: the group broke.
    """
    with as_communication_error():
        dist.all_reduce(values, group=group)


@contextmanager
def as_communication_error() -> Iterator[None]:
    """Turn the errors of a group into `CommunicationError`, which holds no frames of theirs."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        why = str(error)
    else:
        return
    raise CommunicationError(
        f"the process group broke, {why}: another worker failed, or did not call this"
    )


def digest_of(value: object) -> int:
    """Return 64 bits of a hash of a value's `repr`; the same in every process."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
