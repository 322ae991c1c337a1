"""The state that all branches of a change start from, and the held-out batch that they are seen by.

Knows a bench and its files; nothing of ramps that are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.dynamic_sgd.ramps import RAMPS
from benchmarks.runs.subject import (
    Bench,
    Conditions,
    DivergedError,
    samples_of,
    set_up,
    subject_of,
)

__all__ = ["HELD_OUT_SAMPLES", "HeldOut", "load_bench", "save_bench"]

HELD_OUT_SAMPLES = 128


class HeldOut:
    """A fixed part of the validation set, the same for all runs of a task.

    Args:
        bench: whose model is looked at.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._batch = samples_of(bench.subject.data, count=HELD_OUT_SAMPLES)

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean loss, in evaluation mode.

        Raises:
            DivergedError: it is not finite.
        """
        model = self._bench.model
        model.eval()
        loss = self._bench.subject.task.loss(model, self._batch).item()
        model.train()
        if not math.isfinite(loss):
            raise DivergedError
        return loss


def save_bench(bench: Bench, *, folder: str, file: str) -> None:
    """Save a bench between two steps, in a file of a folder."""
    path = Path(folder, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    states = {
        "model": bench.model.state_dict(),
        "optimizer": bench.optimizer.state_dict(),
        "session": bench.session.state_dict(),
    }
    torch.save(states, path)


def load_bench(
    spec: Mapping[str, Any], point: Mapping[str, Any], *, held: bool, scale: int | None = None
) -> Bench:
    """Return a bench that goes on from a saved point with another batch.

    Args:
        spec: task, form, folder, seed, momentum, scale before and after, ramp.
        point: file in the folder, and part of the run.
        held: whether the schedule stands still.
        scale: base batches of a worker's step, instead of those after the change.
    """
    ramp = RAMPS[spec["ramp"]]
    conditions = Conditions(
        seed=spec["seed"],
        rule=ramp.rule(before=spec["before"]),
        scale=spec["after"] if scale is None else scale,
        compensation=ramp.compensation,
        momentum=spec["momentum"],
        held_at=point["part"] if held else None,
        measure=False,
    )
    bench = set_up(subject_of(spec["task"], quick=spec["quick"]), conditions)
    states = torch.load(Path(spec["folder"], point["file"]), weights_only=True)
    bench.model.load_state_dict(states["model"])
    bench.optimizer.load_state_dict(states["optimizer"])
    bench.session.load_state_dict(states["session"])
    ramp.change(bench.optimizer, ratio=spec["after"] / spec["before"])
    return bench
