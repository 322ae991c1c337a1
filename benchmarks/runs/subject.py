"""One task made ready to train: model, optimizer and session, with a batch that can change.

Knows a task and elastane's session; nothing of what is measured, of tables or of other runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import click
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import default_collate

from benchmarks.tasks import load_task
from benchmarks.tasks.task import Data, Recipe, Task
from elastane import Follow, LoaderOptions, LocalBatch, Measuring, Session, StepResult
from elastane.batching import World
from elastane.errors import NonFiniteError
from elastane.momentum import Compensation
from elastane.scaling import Rule

__all__ = [
    "Bench",
    "Conditions",
    "DivergedError",
    "ScaledBatch",
    "Subject",
    "samples_of",
    "set_up",
    "steps_of",
    "subject_of",
]


class DivergedError(Exception):
    """Loss or gradients are not finite any longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A task in one of its two sizes, with its data."""

    task: Task
    recipe: Recipe
    data: Data


@lru_cache
def subject_of(name: str, *, quick: bool) -> Subject:
    """Return a task with its data, which a process loads once.

    Raises:
        ClickException: there is no such task, or something is missing that it needs.
    """
    task = load_task(name)
    missing = task.missing()
    if missing is not None:
        raise click.ClickException(f"{name}: {missing}")
    recipe = task.quick_recipe if quick else task.recipe
    return Subject(task=task, recipe=recipe, data=task.load(quick))


class ScaledBatch:
    """A batch policy that emulates `scale` workers on one, each with a base batch.

    Args:
        base_batch_size: samples of a worker.
        scale: number of workers; may be set anew between two steps.
        split: micro-batches that each worker's samples are split into.
        most_samples: of several workers that are computed as one micro-batch; their own
            gradients are not to be had then.
    """

    def __init__(
        self, base_batch_size: int, *, scale: int, split: int = 1, most_samples: int = 0
    ) -> None:
        self._base_batch_size = base_batch_size
        self._split = split
        self._together = max(most_samples // base_batch_size, 1)
        self.scale = scale

    def batch_samples(self, world_size: int) -> int:
        """Return the samples of all emulated workers."""
        return self._base_batch_size * self.scale * world_size

    def num_parts(self, world_size: int) -> int:
        """Return the number of real workers."""
        return world_size

    def deal(
        self, start: int, stop: int, *, world: World, min_samples: int
    ) -> Sequence[tuple[int, int]]:
        """Return a micro-batch for each emulated worker, unless they are split or together."""
        samples = self._base_batch_size * self.scale
        count = math.ceil(self.scale * self._split / self._together)
        now = LocalBatch(samples, micro_batches=count)
        return now.deal(start, stop, world=world, min_samples=min_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Under which a subject is trained.

    Attributes:
        seed: of the model's first weights and of the order of the samples.
        rule: scaling rule.
        scale: base batches of a step, at first.
        compensation: momentum compensation.
        split: micro-batches for each base batch; 2 lets a single base batch be measured.
        momentum: another one than the recipe's. The learning rate is changed with it so that
            `lr / (1 - momentum)`, what a gradient is worth in the end, stays.
        held_at: part of the run, 0 to 1, whose learning rate is kept on without end.
        order: another seed for the order of the samples alone.
        measure: whether gradient statistics are taken.
        every: in which of the steps, as `Measuring.every`.
        smoothing: of their averages; 0 leaves each step's own, `None` is elastane's default.
        precondition: whether gradients are measured as AdamW sees them.
        follow: what besides the learning rate follows the batch.
        lr_factor: on the recipe's learning rate.
    """

    seed: int
    rule: Rule
    scale: int = 1
    compensation: Compensation | None = None
    split: int = 1
    momentum: float | None = None
    held_at: float | None = None
    order: int | None = None
    measure: bool = True
    every: int | str = 1
    smoothing: float | None = None
    precondition: bool = False
    follow: Follow = Follow()
    lr_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """All that one run has."""

    subject: Subject
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: ScaledBatch
    session: Session

    def evaluate(self) -> tuple[float, float]:
        """Return metric and mean loss over the validation set.

        Raises:
            DivergedError: one of them is not finite.
        """
        task = self.subject.task
        try:
            found = task.evaluate(self.model, self.subject.data)
        except OverflowError as error:  # such as a perplexity beyond all numbers
            raise DivergedError from error
        metric, loss = float(found[task.metric]), float(found["loss"])
        if not (math.isfinite(metric) and math.isfinite(loss)):
            raise DivergedError
        return metric, loss


_ENDLESS = 1e9
_NEVER = 10**9
_MOST_SAMPLES = 128  # the mean gradient of many small batches, in a third of the time


def set_up(subject: Subject, conditions: Conditions) -> Bench:
    """Return a bench; its session is still to be entered."""
    recipe = subject.recipe
    torch.manual_seed(conditions.seed)
    model = subject.task.build()
    momentum = recipe.momentum if conditions.momentum is None else conditions.momentum
    optimizer = _optimizer(model, recipe, momentum=momentum, lr_factor=conditions.lr_factor)
    batch = ScaledBatch(
        recipe.base_batch_size,
        scale=conditions.scale,
        split=conditions.split,
        most_samples=_MOST_SAMPLES if _may_join(model, conditions) else 0,
    )
    session = Session(
        model,
        optimizer=optimizer,
        dataset=subject.data.train,
        base_batch_size=recipe.base_batch_size,
        num_steps=recipe.num_steps if conditions.held_at is None else _ENDLESS,
        schedule=_schedule(recipe, held_at=conditions.held_at),
        rule=conditions.rule,
        batch=batch,
        compensation=conditions.compensation,
        measuring=Measuring(
            every=conditions.every if conditions.measure else _NEVER,
            smoothing=conditions.smoothing,
            precondition=conditions.precondition,
        ),
        follow=conditions.follow,
        loader=LoaderOptions(
            seed=conditions.seed if conditions.order is None else conditions.order,
            straddle_epochs=True,  # no short batches: each step has the scale that it is said to
            collate_fn=subject.data.collate,
        ),
        progress_bar=False,
    )
    return Bench(subject=subject, model=model, optimizer=optimizer, batch=batch, session=session)


def _optimizer(
    model: nn.Module, recipe: Recipe, *, momentum: float, lr_factor: float
) -> torch.optim.Optimizer:
    lr, decay = recipe.lr * lr_factor, recipe.weight_decay
    if recipe.betas is not None:
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=recipe.betas, weight_decay=decay)
    lr *= (1 - momentum) / (1 - recipe.momentum)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=decay)


def _may_join(model: nn.Module, conditions: Conditions) -> bool:
    """Return whether nobody wants to see the workers' own gradients."""
    wanted = conditions.measure or conditions.follow.takes_squares
    return not wanted and not _has_batch_norm(model)


def _has_batch_norm(model: nn.Module) -> bool:
    """Return whether a sample's gradient depends on who else is in its micro-batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def _schedule(recipe: Recipe, *, held_at: float | None) -> Callable[[float], float]:
    if held_at is not None:
        held = recipe.schedule(held_at)
        return lambda progress: held  # noqa: ARG005 (a schedule)
    return lambda progress: recipe.schedule(min(progress / recipe.num_steps, 1.0))


def steps_of(bench: Bench) -> Iterator[StepResult]:
    """Train and yield each step's result; to be used inside `with bench.session`.

    Raises:
        DivergedError: a loss or a gradient is not finite. On one machine a step that was not
            finite is not finite the next time either, so nothing is waited for.
    """
    session, loss_of = bench.session, bench.subject.task.loss
    try:
        for batch in session:
            session.backward(loss_of(session.model, batch))
            result = session.step()
            if result is None:
                continue
            if result.skipped or result.loss is None or not math.isfinite(result.loss):
                raise DivergedError
            yield result
    except NonFiniteError as error:
        raise DivergedError from error


def samples_of(data: Data, *, count: int) -> Any:
    """Return the first samples of the validation set as one batch."""
    dataset: Any = data.validation
    samples = [dataset[index] for index in range(min(count, len(dataset)))]
    return (data.collate or default_collate)(samples)
