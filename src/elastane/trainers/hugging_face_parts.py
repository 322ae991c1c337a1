"""What stands in Hugging Face's loop for the parts whose work a session does.

Knows the Trainer's state and callbacks; nothing of sessions.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from elastane.errors import UsageError

__all__ = ["Epochs", "Memory", "Stepped", "Turns"]

REMEMBERED = (
    *("global_step", "epoch", "log_history", "total_flos"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)


class Turns:
    """What the loop iterates over in place of batches: `training_step` fetches those itself."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({} for _ in itertools.count())


class Stepped:
    """Stands in the loop for the optimizer, or the schedule, that the session has stepped already.

    Args:
        real: the one that it stands for; all but `step` is that one's.
        name: for the error.
    """

    def __init__(self, real: Any, name: str) -> None:
        self.real = real
        self.is_due = False
        self._name = name

    def step(self, *_: Any) -> None:
        """Do nothing, once for each step of the session.

        Raises:
            UsageError: called by anybody else than the loop.
        """
        if not self.is_due:
            raise UsageError(
                f"{self._name}.step() was called besides the Trainer's loop: the session steps "
                "optimizer and schedule, by what each step was worth; leave the call out"
            )
        self.is_due = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class Epochs(TrainerCallback):
    """Tells the epoch by the samples that were committed, before any other callback looks.

    Args:
        epoch: returns it; `None` before the first step.
    """

    def __init__(self, epoch: Callable[[], float | None]) -> None:
        self._epoch = epoch

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **_: Any,
    ) -> None:
        """Set the epoch."""
        epoch = self._epoch()
        if epoch is not None:
            state.epoch = epoch


class Memory:
    """What the Trainer knows of the run, for workers that come later: logs, best metric, patience.

    A worker that was there keeps its own: it ends the same steps itself.

    Args:
        trainer: whose state it is.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def _callbacks(self) -> dict[str, Any]:
        callbacks = enumerate(self._trainer.callback_handler.callbacks)
        return {
            f"{number} {type(one).__name__}": one
            for number, one in callbacks
            if isinstance(one, ExportableState)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return it as text."""
        state = self._trainer.state
        known = {name: getattr(state, name) for name in REMEMBERED}
        callbacks = {name: one.state()["attributes"] for name, one in self._callbacks().items()}
        return {"json": json.dumps({"state": known, "callbacks": callbacks}, default=str)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take it up, unless this worker was there."""
        known = json.loads(state_dict["json"])
        own = self._trainer.state
        if known["state"]["global_step"] <= own.global_step + 1:
            return
        for name in REMEMBERED:
            setattr(own, name, known["state"][name])
        for name, one in self._callbacks().items():
            for attribute, value in known["callbacks"].get(name, {}).items():
                setattr(one, attribute, value)
