"""Trains a job by the library, in whatever world this process is in.

Knows elastane, and how a user writes a job down for it; must not know the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import Dataset

from benchmarks.oracle.job import AVERAGE, BASE_BATCH, Batch, Job, digits, schedule
from benchmarks.oracle.record import Recorder
from elastane import LoaderOptions, Measuring, Session, StepResult, WeightAverage
from elastane.batching import BatchPolicy

__all__ = ["Form", "Groups", "Turn", "backward", "train"]

Groups = list[dict[str, Any]]
"""Parameter groups, as an optimizer takes them."""


def _one_sgd(groups: Groups) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(groups)]


class _Digits(Dataset[tuple[Tensor, int, int]]):
    """The digits in float32; each sample also tells its index."""

    def __init__(self, num_samples: int) -> None:
        images, labels = digits(num_samples)
        self._images, self._labels = images.float(), labels.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        return self._images[index], self._labels[index], index


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One micro-batch in a user's loop.

    Attributes:
        session: the open session.
        optimizer: the user's, or the first of several.
        scaler: the session's, or `None`.
        job: what is trained.
        batch: the micro-batch.
        window: number of the window, counted with those that were skipped.
    """

    session: Session
    optimizer: torch.optim.Optimizer
    scaler: GradScaler | None
    job: Job
    batch: Batch
    window: int

    def loss(self) -> Tensor:
        """Return the mean loss; infinite on the last rank in a poisoned window."""
        loss = self.job.loss(self.session.model, self.batch)
        is_last = self.session.world.rank == self.session.world.world_size - 1
        return loss * float("inf") if is_last and self.window in self.job.poisoned else loss


def backward(turn: Turn) -> None:
    """Run backward as most users do."""
    turn.session.backward(turn.loss())


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a user writes a job down for the library.

    Attributes:
        batch: batch policy by the number of workers.
        optimizers: makes them of the parameter groups.
        options: further arguments of the session, given the first optimizer.
        prepare: what the user makes of the bare model before the optimizer is built.
        wrap: what the user makes of the bare model before training.
        lr: what a learning rate is given as.
        turn: what is done with a micro-batch before `step()`.
    """

    batch: Callable[[int], BatchPolicy]
    optimizers: Callable[[Groups], list[torch.optim.Optimizer]] = _one_sgd
    options: Callable[[torch.optim.Optimizer], Mapping[str, Any]] = lambda _: {}
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    lr: Callable[[float], Any] = float
    turn: Callable[[Turn], None] = backward


def train(
    form: Form, job: Job, *, num_steps: int, state: Path | None = None, save: Path | None = None
) -> dict[str, Any]:
    """Train for a number of committed steps, and return this rank's record.

    Args:
        form: how.
        job: what.
        num_steps: committed steps.
        state: of an earlier training, to go on from.
        save: where to leave a state.
    """
    model = form.prepare(job.model())
    optimizers = form.optimizers(_groups(form, job, model))
    average = WeightAverage(model, decay=job.average_decay or 0.0)
    options = form.options(optimizers[0])
    session = _session(form, job, model, optimizers=optimizers, options=options)
    parts = {"model": model, "session": session, "average": average}
    parts |= {f"optimizer {number}": one for number, one in enumerate(optimizers)}
    if state is not None:
        for name, saved in torch.load(state, weights_only=True).items():
            parts[name].load_state_dict(saved)
    recorder = Recorder(model)
    with session:
        turn = partial(
            Turn, session=session, optimizer=optimizers[0], scaler=options.get("scaler"), job=job
        )
        for result in _results(session, form=form, turn=turn, recorder=recorder):
            average.update(result)
            _freeze(job, model, step=recorder.num_committed)
            if recorder.num_committed == num_steps:
                break
    if save is not None:
        _save(parts, save, rank=session.world.rank)
    record = recorder.finished()
    if job.average_decay is not None:
        weights = [tensor.double().reshape(-1) for tensor in average.weights.values()]
        record["buffers"][AVERAGE] = torch.cat(weights)
    return record


def _save(parts: Mapping[str, Any], path: Path, *, rank: int) -> None:
    for part in parts.values():
        consolidate = getattr(part, "consolidate_state_dict", None)
        if consolidate is not None:  # a ZeroRedundancyOptimizer's, on all workers
            consolidate()
    if rank == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)


def _groups(form: Form, job: Job, model: nn.Module) -> Groups:
    return [
        {
            "params": [p for name, p in model.named_parameters() if name.startswith(group.prefix)],
            "lr": form.lr(group.lr),
            "momentum": group.momentum,
            "weight_decay": group.weight_decay,
        }
        for group in job.groups
    ]


def _session(
    form: Form,
    job: Job,
    model: nn.Module,
    *,
    optimizers: list[torch.optim.Optimizer],
    options: Mapping[str, Any],
) -> Session:
    _freeze(job, model, step=0)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    per = "param_group" if job.gain_per_group else "model"
    return Session(
        form.wrap(model),
        optimizer=optimizers if len(optimizers) > 1 else optimizers[0],
        dataset=_Digits(job.num_samples),
        base_batch_size=BASE_BATCH,
        num_steps=1e9,
        schedule=schedule,
        batch=form.batch(world_size),
        loader=LoaderOptions(seed=3),
        measuring=Measuring(
            every=job.measured_every,
            per=per,
            precondition=job.adam is not None and job.adam.preconditions,
        ),
        progress_bar=False,
        **options,
    )


def _freeze(job: Job, model: nn.Module, *, step: int) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(job.trains(name, step))


def _results(
    session: Session, *, form: Form, turn: Callable[..., Turn], recorder: Recorder
) -> Iterator[StepResult]:
    """Train as a user does, take down what happens, and yield each window's result."""
    for batch in session:
        recorder.saw(batch[2], weight=session.weight)
        now = turn(batch=batch, window=recorder.num_windows)
        form.turn(now)
        result = session.step()
        if result is not None:
            scale = 1.0 if now.scaler is None else now.scaler.get_scale()
            recorder.ended(result, loss_scale=scale)
            yield result
