"""What an optimizer must do under a rule: train through a change of batch, and resume to the bit.

Knows sessions; nothing of which optimizers there are, or of tables.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from elastane import (
    LEGW,
    AdamScale,
    AdaScale,
    Identity,
    Linear,
    LoaderOptions,
    LocalBatch,
    Session,
    Sqrt,
    WarmUp,
)
from elastane.batching import World
from elastane.scaling import Rule
from examples.digits.data import load_digits

__all__ = ["RULES", "Outcome", "check_contract"]

Builder = Callable[[nn.Module], Optimizer]

RULES: Mapping[str, Rule] = {
    "identity": Identity(),
    "linear": Linear(),
    "linear, warm-up": WarmUp(rule=Linear()),
    "sqrt": Sqrt(),
    "legw": LEGW(warmup_steps=10),
    "adascale": AdaScale(),
    "adamscale": AdamScale(),
}
BASE_BATCH, NUM_STEPS, GROWTH, GROWS_AT, SAVED_AT, REPLAYED = 8, 400, 4, 60, 70, 8
_WIDTH, _HORIZON = 5, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run.

    Attributes:
        loss_before: held-out loss of the untrained model.
        loss_after: held-out loss at the end.
        peak_ratio: largest mean of five losses of the 20 steps after the change, over that of the
            five before it.
        peak_ratio_reset: the same if the optimizer's state is dropped at the change.
        steps: optimizer steps.
        resumes: whether a run that was saved after the change goes on to the bit.
    """

    loss_before: float
    loss_after: float
    peak_ratio: float
    peak_ratio_reset: float
    steps: int
    resumes: bool

    @property
    def converges(self) -> bool:
        """Whether the held-out loss came below half of what it was."""
        return math.isfinite(self.loss_after) and self.loss_after < self.loss_before / 2


class _GrowingBatch:
    """Two micro-batches of 4 samples, and `GROWTH` times as many after the change."""

    def __init__(self) -> None:
        self.scale = 1

    def _now(self) -> LocalBatch:
        return LocalBatch(BASE_BATCH * self.scale, micro_batches=2 * self.scale)

    def batch_samples(self, world_size: int) -> int:
        return self._now().batch_samples(world_size)

    def num_parts(self, world_size: int) -> int:
        return self._now().num_parts(world_size)

    def deal(
        self, start: int, stop: int, *, world: World, min_samples: int
    ) -> Sequence[tuple[int, int]]:
        return self._now().deal(start, stop, world=world, min_samples=min_samples)


class _Run:
    """A small network on digits, under one optimizer and rule."""

    def __init__(self, build: Builder, rule: Rule, *, drops_state: bool = False) -> None:
        torch.manual_seed(0)
        self._drops_state = drops_state
        train, self._held_out = _digits()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(784, 24), nn.Tanh(), nn.Linear(24, 10))
        self.optimizer = build(self.model)
        self.batch = _GrowingBatch()
        self.losses: list[float] = []
        self.session = Session(
            self.model,
            optimizer=self.optimizer,
            schedule=CosineAnnealingLR(self.optimizer, T_max=NUM_STEPS),
            dataset=train,
            base_batch_size=BASE_BATCH,
            num_steps=NUM_STEPS,
            rule=rule,
            batch=self.batch,
            loader=LoaderOptions(seed=0),
            progress_bar=False,
        )

    def go_on(self, *, until: int | None = None) -> None:
        """Train on until so many steps were made, or to the end; the batch grows on the way."""
        if until is not None and len(self.losses) >= until:
            return
        for images, labels in self.session:
            self.session.backward(F.cross_entropy(self.session.model(images), labels))
            result = self.session.step()
            if result is None:
                continue
            self.losses.append(math.nan if result.loss is None else result.loss)
            if len(self.losses) == GROWS_AT:
                self.batch.scale = GROWTH
                if self._drops_state:
                    self.optimizer.state.clear()
            if len(self.losses) == until:
                return

    def held_out_loss(self) -> float:
        images, labels = self._held_out.tensors
        with torch.no_grad():
            return float(F.cross_entropy(self.model(images), labels))

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def states(self) -> list[Any]:
        parts = (self.model, self.optimizer, self.session)
        return [copy.deepcopy(part.state_dict()) for part in parts]

    def take_up(self, states: Sequence[Any]) -> None:
        self.batch.scale = GROWTH
        for part, state in zip((self.model, self.optimizer, self.session), states, strict=True):
            part.load_state_dict(state)


def check_contract(build: Builder, rule: Rule) -> Outcome:
    """Train, save on the way behind the change of batch, and resume.

    Args:
        build: returns the optimizer of a model.
        rule: scaling rule.
    """
    whole = _Run(build, rule)
    before = whole.held_out_loss()
    with whole.session:
        whole.go_on(until=SAVED_AT)
        states = whole.states()
        whole.go_on(until=SAVED_AT + REPLAYED)
        weights = whole.weights()
        whole.go_on()
    again = _Run(build, rule)
    again.take_up(states)
    with again.session:
        again.go_on(until=REPLAYED)
    reset = _Run(build, rule, drops_state=True)
    with reset.session:
        reset.go_on(until=GROWS_AT + _HORIZON)
    return Outcome(
        loss_before=before,
        loss_after=whole.held_out_loss(),
        peak_ratio=_peak_ratio(whole.losses),
        peak_ratio_reset=_peak_ratio(reset.losses),
        steps=len(whole.losses),
        resumes=torch.equal(again.weights(), weights),
    )


def _peak_ratio(losses: Sequence[float]) -> float:
    def mean(end: int) -> float:
        return sum(losses[end - _WIDTH : end]) / _WIDTH

    last = min(GROWS_AT + _HORIZON, len(losses))
    return max(mean(end) for end in range(GROWS_AT + _WIDTH, last + 1)) / mean(GROWS_AT)


_digits = cache(load_digits)
