"""The workers as a worker sees them: what a membership must do, and the group that it works with.

Knows process groups and DDP; nothing of steps, data or schedules, nor of who decides on members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from elastane import replica
from elastane._compat import held_by_modules, rebuild_buckets, remove_hooks
from elastane.batching import World
from elastane.gradients import GradientTap
from elastane.peers import Peers

__all__ = ["Membership", "Replayable", "Trainee", "Wrapping"]

T = TypeVar("T")


class Replayable(Protocol):
    """What a membership asks of a training that another worker is to follow while it goes on.

    See `elastane.replay.Replay`, which is one.
    """

    @property
    def is_possible(self) -> bool:
        """Whether it can be followed at all."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters."""
        ...

    def parts(self) -> list[range]:
        """Return the parts that it is shown in, as numbers of parameters."""
        ...

    def watch(self, on_step: Callable[[Sequence[float]], None] | None) -> None:
        """Have each step call this right before it is made."""
        ...

    def part(self, some: range) -> dict[str, Any]:
        """Return a copy of a part."""
        ...

    def take_part(self, tree: Mapping[str, Any]) -> None:
        """Have another worker's part."""
        ...

    def step(self, count: int, buffer_factors: Sequence[float]) -> dict[str, Any]:
        """Return the step at hand, of the first parameters."""
        ...

    def have_back(self, step: Mapping[str, Any]) -> None:
        """Know that a step that was returned is needed no longer. Any thread may call it."""
        ...

    def take_step(self, tree: Mapping[str, Any]) -> None:
        """Make another worker's step."""
        ...

    def sums(self, some: range) -> list[int]:
        """Return numbers that are equal for equal parts."""
        ...


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

    def replay(self) -> Replayable:
        """Return what another worker may follow, or this one of another's."""
        ...

    def rest_of_state(self) -> dict[str, Any]:
        """Return `state_dict` without what `replay` shows."""
        ...

    def completed(self, rest: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole state of another worker's rest, with what is here already."""
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

    def save(self, *, writes: bool = True) -> None:
        """Write a durable checkpoint now, if the run keeps any.

        Args:
            writes: whether this process does; not one that only gives its part of the state.
        """
        ...

    def resume(self) -> bool:
        """Go on from the newest durable checkpoint; say whether there is one."""
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
    def peers(self) -> Peers | None:
        """The workers of the present group; `None` while this worker is alone."""
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

    def arrived(self) -> None:
        """Know that this worker's own part of the step is done."""
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

    in_shards = False

    def __init__(self, model: replica.Replica, *, tap: GradientTap, ddp: Mapping[str, Any]) -> None:
        self.model = model
        self._tap = tap
        self._ddp = dict(ddp)
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._trainable: list[int] = []
        self._wrapper: DistributedDataParallel | None = None
        self._is_settled = True
        self.peers: Peers | None = None

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.model.parameters()).device

    def use(self, peers: Peers | None, *, spread_weights: bool = True) -> None:
        """Average over a group from now on; a single worker's model stays bare.

        Args:
            peers: the workers, or `None`.
            spread_weights: whether the workers may differ, so that rank 0's weights are for all.
        """
        self.drop()
        self.peers = peers
        if peers is not None:
            self._wrap(peers, spread_weights=spread_weights)

    def refresh(self) -> None:
        """Wrap again if other parameters of the model require gradients than when it was wrapped.

        DDP averages what required a gradient when it was made. All workers must freeze and
        unfreeze alike.
        """
        if self.peers is not None and self._now_trainable() != self._trainable:
            self.merge_statistics()  # DDP would spread the buffers of rank 0
            self._unwrap()
            self._wrap(self.peers, spread_weights=True)

    def settle(self) -> None:
        """Do between two steps what DDP would do in its second forward, where nobody can break it.

        All workers must call it before each step.

        Raises:
            CommunicationError: the group broke.
        """
        wrapper, peers = self._wrapper, self.peers
        if wrapper is None or peers is None or self._is_settled:
            return
        self._is_settled = peers.call(
            lambda: rebuild_buckets(wrapper), on_host=self.device.type == "cpu"
        )

    def merge_statistics(self, *, counted: bool = True) -> None:
        """Give all workers the same running statistics of BatchNorm.

        Args:
            counted: whether this worker's own statistics take part.
        """
        if self.peers is not None:
            replica.merge_batch_statistics(
                self.model.inner, sum_over_workers=self.peers.sum, counted=counted
            )

    def drop(self) -> None:
        """Let go of the group: nothing here refers to it, or to the wrapper, any longer."""
        if self.peers is not None:
            self.peers.breaker.await_returns()
        self._unwrap()
        self.peers = None

    def _now_trainable(self) -> list[int]:
        """Return the modules and the parameters that require a gradient, by their ids."""
        children = [id(child) for _, held in self._held for child in held.values()]
        owned = (p for held, _ in self._held for p in held.values())
        return children + [id(p) for p in owned if p is not None and p.requires_grad]

    def _wrap(self, peers: Peers, *, spread_weights: bool) -> None:
        options = {**self._ddp, "init_sync": spread_weights and self._ddp.get("init_sync", True)}
        wrapper = peers.call(
            lambda: replica.wrap(self.model.inner, group=peers.group, options=options),
            on_host=self.device.type == "cpu",
        )
        self._tap.attach(wrapper, peers=peers)
        self.model.use(wrapper, on_failure=self._tap.note_failure)
        self._held = held_by_modules(self.model.inner)
        self._trainable = self._now_trainable()
        self._wrapper, self._is_settled = wrapper, wrapper.find_unused_parameters

    def _unwrap(self) -> None:
        if self._wrapper is not None:
            remove_hooks(self._wrapper)
        self.model.use(None)
        self._tap.detach()
        self._held, self._trainable = [], []
        self._wrapper = None


def backend_of(device: torch.device) -> str:
    """Return the communication backend for tensors on a device."""
    return "nccl" if device.type == "cuda" else "gloo"
