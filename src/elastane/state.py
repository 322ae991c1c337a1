"""A session's state: all that is not in the model's and the optimizer's own state.

Gathers and gives back the parts' states, and refuses one of another run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastane.errors import StateError
from elastane.group import Membership
from elastane.loop import Loop
from elastane.rng import rng_state, set_rng_state

__all__ = ["STATE_VERSION", "SessionState"]

STATE_VERSION = 6


class SessionState:
    """The parts whose state makes a session go on as if nothing had happened.

    Args:
        identity: numbers that must be the same when the state is loaded.
        loop: holds the position; its stepper schedule and scaler, and the controller progress,
            moments and ramps.
        membership: knows this worker's rank.
        device: the model's.
    """

    def __init__(
        self,
        identity: Mapping[str, int],
        *,
        loop: Loop,
        membership: Membership,
        device: torch.device,
    ) -> None:
        self._identity = {"version": STATE_VERSION, **identity}
        self._loop = loop
        self._membership = membership
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Return the state; it loads with `torch.load(weights_only=True)`."""
        return {
            **self._identity,
            "position": self._loop.position,
            "controller": self._loop.stepper.controller.state_dict(),
            "stepper": self._loop.stepper.state_dict(),
            "rng": rng_state(rank=self._membership.world.rank, device=self._device),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state.

        Raises:
            StateError: saved by another version, or by a run with another identity; nothing has
                changed then.
        """
        self._loop.check_between_windows()
        if not isinstance(state, Mapping) or "version" not in state:
            raise StateError(
                "this is no session's state: pass what session.state_dict() returned (for "
                'example saved["session"])'
            )
        for name, own in self._identity.items():
            if state.get(name) != own:
                message = (
                    f"the state was saved with {name}={state.get(name)!r} and this session has "
                    f"{own!r}: resume with what the run was started with"
                )
                raise StateError(message)
        own = self.state_dict()
        try:
            self._take(state)
        except Exception as error:
            self._take(own)
            if isinstance(error, StateError):
                raise
            message = f"the state lacks something, or has it in another form: {error!r}"
            raise StateError(message) from error
        self._loop.revive()

    def _take(self, state: Mapping[str, Any]) -> None:
        self._loop.stepper.controller.load_state_dict(state["controller"])
        self._loop.stepper.load_state_dict(state["stepper"])
        set_rng_state(state["rng"], rank=self._membership.world.rank, device=self._device)
        self._loop.position = int(state["position"])
