"""How the runs of the AdaScale table are carried out, each by a function of its spec.

Knows the form of a spec; nothing of which runs there are, or of what is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from benchmarks.adascale.rules import TRIED, compensation_of, rule_of
from benchmarks.adascale.workers import train_on_workers
from benchmarks.runs.calibration import calibrate
from benchmarks.runs.subject import Conditions, subject_of
from benchmarks.runs.training import mean_blocks, train
from elastane import StepResult
from elastane.noise import MomentAverage, Moments, gain, smoothing

__all__ = [
    "PREDICTED_SCALES",
    "Predictor",
    "calibrate",
    "measure_gain",
    "train_on_workers",
    "train_once",
]

PREDICTED_SCALES = tuple(2**power for power in range(1, 11))
_TRACED = 200

Spec = Mapping[str, Any]


def train_once(spec: Spec, needs: Mapping[str, Spec]) -> dict[str, Any]:
    """Train under a rule.

    Raises:
        ValueError: it is to take as many steps as a run that never came to its end.
    """
    steps = None
    for name, record in needs.items():
        if record["metric"] is None:
            raise ValueError(f"{name!r} broke off, so its number of steps says nothing")
        steps = record["steps"]
    (_, scale), *changes = spec["scales"]
    conditions = Conditions(
        seed=spec["seed"],
        rule=rule_of(spec["rule"], steps=steps),
        scale=scale,
        compensation=compensation_of(spec["rule"]),
    )
    conditions = replace(conditions, **TRIED.get(spec["rule"], {}))
    subject = subject_of(spec["task"], quick=spec["quick"])
    return train(subject, conditions, changes=[(at, to) for at, to in changes]).record()


def measure_gain(spec: Spec, needs: Mapping[str, Spec]) -> dict[str, Any]:  # noqa: ARG001
    """Train with single base batches, and return the mean gain that their noise predicts.

    A single gradient a step tells no noise, so each base batch is taken in two halves. That is the
    same training but for batch statistics, which are those of half a base batch here.
    """
    subject = subject_of(spec["task"], quick=spec["quick"])
    predictor = Predictor(base_batch_size=subject.recipe.base_batch_size)
    rule = rule_of("adascale")
    conditions = Conditions(seed=spec["seed"], rule=rule, split=2, smoothing=0.0)
    course = train(subject, conditions, points=1, watch=predictor.watch)
    return {
        "gains": {str(scale): predictor.mean_gain(scale) for scale in PREDICTED_SCALES},
        "noise": mean_blocks(predictor.trace, most=_TRACED),
        "metric": course.metric,
    }


class Predictor:
    """Predicts from the moments of single base batches how many steps AdaScale takes at a scale.

    It goes along the run in AdaScale's steps, each worth the gain that the moments so far give.
    What a step at scale `S` measures is the mean of what `S` base steps measured around there; it
    is averaged over steps as AdaScale does.

    Args:
        base_batch_size: in samples.
    """

    def __init__(self, *, base_batch_size: int) -> None:
        self._base_batch_size = base_batch_size
        self.trace: dict[str, list[float]] = {"tau": [], "variance": [], "sqr_norm": []}

    def watch(self, result: StepResult) -> None:
        """Take a step's result; its moments are those of the step before it alone."""
        if result.moments is not None:
            self.trace["tau"].append(result.previous_progress)
            self.trace["variance"].append(result.moments.variance)
            self.trace["sqr_norm"].append(result.moments.sqr_norm)

    def mean_gain(self, scale: int) -> float:
        """Return base steps over steps at a scale."""
        num_steps = len(self.trace["tau"])
        average, progress, steps = MomentAverage(), 0.0, 0
        while progress < num_steps:
            known = average.read()
            measured = self._around(progress, count=scale)
            progress += 1.0 if known is None else self._gain(known, scale)
            average = average.updated(measured, smoothing=smoothing(scale))
            steps += 1
        return num_steps / steps

    def _around(self, progress: float, *, count: int) -> Moments:
        """Return the mean moments of so many base steps around a place, fewer at the ends."""
        first = max(round(progress - count / 2), 0)
        last = max(round(progress + count / 2), first + 1)
        return Moments(
            variance=fmean(self.trace["variance"][first:last]),
            sqr_norm=fmean(self.trace["sqr_norm"][first:last]),
        )

    def _gain(self, moments: Moments, scale: int) -> float:
        return gain(moments, scale=scale, base_batch_size=self._base_batch_size)
