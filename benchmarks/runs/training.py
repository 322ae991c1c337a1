"""Trains a subject once from beginning to end, and keeps what a table needs of it.

Knows one run; nothing of rules that are compared, of tables or of files.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.runs.subject import Conditions, DivergedError, Subject, set_up, steps_of
from elastane import StepResult

__all__ = ["Change", "Course", "has_learnt", "late_loss", "mean_blocks", "scale_at", "train"]

POINTS = 20
MOST_TRACED = 200
LATE_PART = 0.1
_LEARNT_PART = 0.95
_TRACED = ("tau", "loss", "lr", "gain", "batch")

Change = tuple[float, int]
"""From which part of the run on, 0 to 1, a step has which scale."""


@dataclass(slots=True, kw_only=True)
class Course:
    """What became of a run.

    Attributes:
        num_steps: base steps that it was to reach.
        steps: optimizer steps.
        tau: base steps reached.
        metric: over the validation set at the end; `None` if it broke off.
        loss: mean over the validation set at the end.
        train_loss: mean over the steps of the last tenth of the run.
        first_loss: of the first step, which is an untrained model's.
        diverged: whether a loss or gradient was not finite, or nothing was left of what was learnt
            (see `has_learnt`) in the mean training loss of the run's last tenth.
        curve: (tau, metric, loss) over the validation set along the run.
        trace: progress before a step, loss, learning rate, gain and batch, by name.
    """

    num_steps: float
    steps: int = 0
    tau: float = 0.0
    metric: float | None = None
    loss: float | None = None
    train_loss: float | None = None
    first_loss: float | None = None
    diverged: bool = False
    curve: list[tuple[float, float, float]] = field(default_factory=list)
    trace: dict[str, list[float]] = field(default_factory=lambda: {n: [] for n in _TRACED})

    def take(self, result: StepResult) -> None:
        """Note a step."""
        loss = result.loss or 0.0
        values = (result.previous_progress, loss, result.lr, result.gain, result.batch_samples)
        for name, value in zip(_TRACED, values, strict=True):
            self.trace[name].append(float(value))
        if self.first_loss is None:
            self.first_loss = loss
        self.steps, self.tau = result.step, result.progress

    def note(self, point: tuple[float, float]) -> None:
        """Note metric and loss over the validation set, at where the run is."""
        self.metric, self.loss = point
        self.curve.append((self.tau, *point))

    def close(self, *, broke_off: bool) -> None:
        """Judge the run once it is over."""
        if self.trace["tau"]:
            self.train_loss = late_loss(self.trace, num_steps=self.num_steps)
        if broke_off:
            self.metric = self.loss = None
        ends, began = self.train_loss, self.first_loss
        learnt = ends is not None and began is not None and has_learnt(ends, untrained=began)
        self.diverged = broke_off or not learnt

    def record(self) -> dict[str, Any]:
        """Return it as JSON values, the trace shortened to means of blocks."""
        return asdict(self) | {"trace": mean_blocks(self.trace, most=MOST_TRACED)}


def train(
    subject: Subject,
    conditions: Conditions,
    *,
    changes: Sequence[Change] = (),
    points: int = POINTS,
    watch: Callable[[StepResult], None] | None = None,
) -> Course:
    """Train to the end, or until it diverges.

    Args:
        subject: what is trained.
        conditions: under which; their scale is the one at first.
        changes: of scale, in order.
        points: evaluations along the run.
        watch: called after each step.
    """
    bench = set_up(subject, conditions)
    course = Course(num_steps=subject.recipe.num_steps)
    first: Change = (0.0, conditions.scale)
    try:
        with bench.session:
            for result in steps_of(bench):
                course.take(result)
                if watch is not None:
                    watch(result)
                part = result.progress / course.num_steps
                bench.batch.scale = scale_at([first, *changes], part=part)
                if part < 1 and result.crossed(course.num_steps / points):
                    course.note(bench.evaluate())
        course.note(bench.evaluate())
    except DivergedError:
        course.close(broke_off=True)
    else:
        course.close(broke_off=False)
    return course


def has_learnt(loss: float, *, untrained: float) -> bool:
    """Return whether a loss is at least 5 % below an untrained model's.

    A network that died gives all inputs the same answer, and has about the loss of an untrained
    one.
    """
    return loss < _LEARNT_PART * untrained


def scale_at(changes: Sequence[Change], *, part: float) -> int:
    """Return the scale of a step that begins at a part of the run."""
    return [scale for start, scale in changes if part >= start][-1]


def late_loss(trace: Mapping[str, Sequence[float]], *, num_steps: float) -> float:
    """Return the mean training loss of the steps in the last tenth, at least of the last one."""
    begins = (1 - LATE_PART) * num_steps
    late = [loss for tau, loss in zip(trace["tau"], trace["loss"], strict=True) if tau >= begins]
    return statistics.fmean(late or trace["loss"][-1:])


def mean_blocks(columns: Mapping[str, Sequence[float]], *, most: int) -> dict[str, list[float]]:
    """Return columns of equal length with at most so many lines: each the mean of a block."""
    count = max((len(values) for values in columns.values()), default=0)
    size = max(math.ceil(count / most), 1)
    return {
        name: [_short(statistics.fmean(values[i : i + size])) for i in range(0, count, size)]
        for name, values in columns.items()
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")
