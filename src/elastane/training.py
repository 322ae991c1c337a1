"""The training as a membership holds it together: all state of model, optimizer and session.

Joins the parts' states for workers that come or lag behind; knows nothing of who takes part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from elastane.batching import World
from elastane.durability import Keeper
from elastane.elastic.cut import put_together
from elastane.elastic.snapshot import load_state, state_of, tensors_of
from elastane.elastic.whole import dealt, dealt_optimizer
from elastane.feed import Feed
from elastane.loop import Loop
from elastane.optimizers import AnyOptimizer
from elastane.replay import Replay
from elastane.reporting import Reporter
from elastane.sharding import is_sharded
from elastane.state import SessionState

__all__ = ["Training"]


class Training:
    """Implements `elastane.group.Trainee`.

    Args:
        model: bare module.
        optimizer: the user's, one or several.
        identity: numbers that make it this run.
        loop: knows step and position.
        feed: deals anew for another place.
        reporter: tells of changes.
        keeper: keeps checkpoints.
        state: the session's.
        stateful: further objects of the user's, by name.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: AnyOptimizer,
        identity: Mapping[str, object],
        loop: Loop,
        feed: Feed,
        reporter: Reporter,
        keeper: Keeper,
        state: SessionState,
        stateful: Mapping[str, Stateful],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._identity = identity
        self._loop = loop
        self._feed = feed
        self._reporter = reporter
        self._keeper = keeper
        self._state = state
        self._stateful = dict(stateful)

    @property
    def step(self) -> int:
        """Committed steps."""
        return self._loop.stepper.controller.step

    def identity(self) -> Mapping[str, object]:
        """Return what makes it this run."""
        return self._identity

    def facts(self) -> Mapping[str, object]:
        """Return where it stands."""
        return self._loop.facts()

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer, session, and what came of the last window."""
        return {
            **state_of(self._model, self._optimizer),
            "session": self._state.state_dict(),
            "loop": self._loop.state_dict(),
            "stateful": {name: one.state_dict() for name, one in self._stateful.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from another worker's state.

        Raises:
            StateError: of another run.
        """
        self._state.load_state_dict(state["session"])
        if is_sharded(self._model):
            state = self._dealt(state)
        load_state(self._model, self._optimizer, state)
        self._loop.load_state_dict(state["loop"])
        for name, one in self._stateful.items():
            one.load_state_dict(state["stateful"][name])

    def replay(self) -> Replay:
        """Return what another worker may follow, or this one of another's."""
        return Replay(self._model, optimizer=self._optimizer, maker=self._loop.stepper.maker)

    def rest_of_state(self) -> dict[str, Any]:
        """Return `state_dict` without parameters and without the optimizer's state of them."""
        state = self.state_dict()
        known = dict(self._model.named_parameters())
        buffers = {name: one for name, one in state["model"].items() if name not in known}
        groups = [{"param_groups": one["param_groups"]} for one in _states_of(state)]
        return {**state, "model": buffers, "optimizer": groups}

    def completed(self, rest: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole state of another worker's rest, with the parameters that are here."""
        own = state_of(self._model, self._optimizer)
        members = [
            {"state": one["state"], **groups}
            for one, groups in zip(_states_of(own), rest["optimizer"], strict=True)
        ]
        several = isinstance(own["optimizer"], list)
        return {
            **rest,
            "model": {**own["model"], **rest["model"]},
            "optimizer": members if several else members[0],
        }

    def _dealt(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state as this worker's part of it, if it is not that already."""
        first = cast("DTensor", next(self._model.parameters()))
        state = put_together(state, mesh=first.device_mesh, device=first.device)
        own = {
            "model": tensors_of(self._model),
            "stateful": {name: one.state_dict() for name, one in self._stateful.items()},
        }
        optimizer = dealt_optimizer(state["optimizer"], optimizer=self._optimizer)
        return {**dealt(state, like=own), "optimizer": optimizer}

    def tensors(self) -> Sequence[Tensor]:
        """Return the model's tensors, in the order in which `state_dict` has them."""
        return list(tensors_of(self._model).values())

    def entered(self, world: World, *, cause: str) -> None:
        """Deal and report for another place from now on."""
        self._feed.reset(world)
        self._keeper.entered(world)
        self._reporter.entered(world, cause=cause)

    def settled(self, step: int) -> None:
        """Know that committed steps up to this one are final, and that no later one is."""
        self._loop.settled(step)

    def save(self, *, writes: bool = True) -> None:
        """Write a durable checkpoint now, if the run keeps any.

        Args:
            writes: whether this process does; not one that only gives its part of the state.
        """
        self._keeper.save(self.step, writes=writes)

    def resume(self) -> bool:
        """Go on from the newest durable checkpoint; say whether there is one.

        Raises:
            StateError: it is of another run.
        """
        state = self._keeper.newest()
        if state is not None:
            self.load_state_dict(state)
        return state is not None

    def left(self) -> None:
        """Tell nothing any longer."""
        self._reporter.leave()

    def status(self) -> Mapping[str, Any]:
        """Return the newest step's numbers."""
        last = self._reporter.last
        controller = self._loop.stepper.controller
        status: dict[str, Any] = {"num_steps": controller.num_steps}
        if last is not None:
            status |= {
                "step": last.step,
                "progress": last.progress,
                "lr": last.lr,
                "gain": last.gain,
                "single_share": last.single_share,
                "batch": last.batch_samples,
                "samples_per_s": last.batch_samples / last.seconds if last.seconds > 0 else None,
            }
        return status


def _states_of(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the state of each optimizer in a state tree."""
    found = state["optimizer"]
    return found if isinstance(found, list) else [found]
