"""A step of a tiny model, by a session and by a plain loop, with its parts timed or not.

Knows which methods of a session's parts do what; nothing of rounds or tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.fixed.recorder import Recorder
from elastane import LocalBatch, Session
from elastane._compat import no_buffer_sync
from elastane.gradients import GradientTap

__all__ = ["AUTOGRAD", "FORWARD", "Setting", "plain_step", "session_step"]

Step = Callable[[], None]

BATCH = 4
_NUM_SAMPLES, _NUM_STEPS, _LR = 4_096, 10**7, 1e-3
LOADING, FORWARD, AUTOGRAD = "loading", "forward", "autograd"
OPTIMIZER, SCHEDULE, DROPPING = "optimizer", "schedule", "dropping gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A worker of a step.

    Attributes:
        workers: number of them.
        micro_batches: of each worker's step.
        rank: this worker's.
    """

    workers: int
    micro_batches: int
    rank: int


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def _dataset() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(_NUM_SAMPLES, 8), torch.randint(4, (_NUM_SAMPLES,)))


def _optimizer(model: nn.Module) -> tuple[torch.optim.SGD, LRScheduler]:
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.9)
    return optimizer, CosineAnnealingLR(optimizer, T_max=_NUM_STEPS)


def _same(_part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _batches(setting: Setting) -> Iterator[list[Tensor]]:
    dataset = _dataset()
    sampler = DistributedSampler(dataset, num_replicas=setting.workers, rank=setting.rank)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, drop_last=True)
    while True:
        yield from loader


def plain_step(setting: Setting, recorder: Recorder | None, _stack: ExitStack) -> Step:
    """Return what makes a step by hand, with DDP if there are several workers."""
    timed = _same if recorder is None else recorder.timed
    model, count = _model(), setting.micro_batches
    optimizer, scheduler = _optimizer(model)
    wrapper = DistributedDataParallel(model, **no_buffer_sync()) if dist.is_initialized() else None
    load = timed(LOADING, _batches(setting).__next__)
    forward = timed(FORWARD, lambda x, y: F.cross_entropy((wrapper or model)(x), y) / count)
    backward = timed(AUTOGRAD, torch.Tensor.backward)
    update, drop = timed(OPTIMIZER, optimizer.step), timed(DROPPING, optimizer.zero_grad)
    move = timed(SCHEDULE, scheduler.step)

    def step() -> None:
        for number in range(count):
            is_last = number == count - 1
            with nullcontext() if is_last or wrapper is None else wrapper.no_sync():
                samples, labels = load()
                backward(forward(samples, labels))
        update()
        move()
        drop()

    return step


def session_step(
    setting: Setting, recorder: Recorder | None, stack: ExitStack, *, run_dir: Path | None = None
) -> Step:
    """Return what makes a step by a session.

    Args:
        setting: the worker.
        recorder: times the session's parts, or `None`.
        stack: keeps the session open.
        run_dir: folder for the run's events, or `None`.
    """
    model = _model()
    optimizer, scheduler = _optimizer(model)
    session = Session(
        model,
        optimizer=optimizer,
        schedule=scheduler,
        dataset=_dataset(),
        base_batch_size=BATCH,
        num_steps=_NUM_STEPS,
        batch=LocalBatch(BATCH * setting.micro_batches, micro_batches=setting.micro_batches),
        run_dir=run_dir,
        progress_bar=False,
    )
    if recorder is not None:
        _time_parts(session, recorder)
    stack.enter_context(session)
    if recorder is not None:
        _time_waits(session, recorder)
    timed = _same if recorder is None else recorder.timed
    forward = timed(FORWARD, lambda x, y: F.cross_entropy(session.model(x), y))
    batches = iter(session)

    def step() -> None:
        result = None
        while result is None:
            samples, labels = next(batches)
            session.backward(forward(samples, labels))
            result = session.step()

    return step


class _TimedLoss:
    """A loss whose backward is timed."""

    def __init__(self, loss: Tensor, recorder: Recorder) -> None:
        self.backward = recorder.timed(AUTOGRAD, loss.backward)


def _time_parts(session: Session, recorder: Recorder) -> None:
    """Have the parts of a session that is not open yet timed."""
    parts, wrap = session._parts, recorder.wrap
    loop, feed, stepper = parts.loop, parts.feed, parts.stepper
    maker, tap, layers = stepper.maker, stepper.tap, stepper._layers
    assert isinstance(tap, GradientTap)
    read, scaled = feed._loader.read, stepper._scaling.scaled
    feed._loader.read = lambda ranges: recorder.timed_iterator(LOADING, read(ranges))
    stepper._scaling.scaled = lambda loss: _TimedLoss(scaled(loss), recorder)  # pyright: ignore
    wrap(feed, "planning", "plan", "_planned")
    wrap(parts.membership, "opening the window", "start_window")
    wrap(stepper, "opening the window", "open", "begin")
    wrap(loop, "opening the window", "_begin")
    wrap(stepper, "taking the loss", "backward")
    wrap(tap, "putting gradients together", "_keep", "_gradients", "_merge_own")
    wrap(tap, "putting gradients together", "_reduce_bucket", "_add_set_aside")
    wrap(tap, "norms of gradients", "_count_local")
    wrap(tap._norms, "norms of gradients", "local", "mean", "local_of", "mean_of")
    wrap(tap, "norms of gradients", "_measure_mean")
    wrap(tap, "reduction of gradients: launch", "_all_reduce", whole=True)
    wrap(tap, "small reduction: build", "_launch_small", "_vector")
    wrap(tap, "small reduction: launch", "_start_sum")
    wrap(tap, "small reduction: read", "_read")
    wrap(layers, "norms of single samples", "_see", "_note", "told", "moments", "begin")
    wrap(loop, "membership", "_extras")
    wrap(parts.membership, "membership", "finished_step")
    wrap(stepper.controller, "decision", "decide")
    wrap(maker, "scaled learning rate", "make")
    wrap(maker._scaled_step, "scaled learning rate", "step")
    wrap(maker._scaled_step, OPTIMIZER, "_step", whole=True)
    wrap(maker._schedule, SCHEDULE, "check_untouched", "multiplier_at", "move")
    wrap(stepper.controller, "commit", "commit")
    wrap(stepper, DROPPING, "discard")
    wrap(parts.reporter, "result", "step")
    wrap(parts.reporter, "telling events", "settled")
    wrap(parts.keeper, "checkpoints", "wishes", "committed", "settled")


def _time_waits(session: Session, recorder: Recorder) -> None:
    """Have the waits of an open session timed."""
    peers = session._parts.membership.peers
    if peers is not None:
        recorder.wrap(peers.breaker, "small reduction: wait", "outcome", whole=True)
