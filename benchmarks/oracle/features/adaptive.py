"""Features of Adam: the gain as it sees gradients, and what of its numbers follows the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.oracle.features.feature import Feature, grid_of
from benchmarks.oracle.job import Adam, Group, Job
from benchmarks.oracle.subject import Form, Groups
from elastane import AdamScale, Follow, GlobalBatch, LocalBatch

__all__ = ["FEATURES"]

_NUMBERS = (Group(lr=0.003, weight_decay=0.1),)
_MAX_NORM = 0.55


def _adamw(groups: Groups) -> list[torch.optim.Optimizer]:
    base = Adam()
    return [torch.optim.AdamW(groups, betas=(base.beta1, base.beta2), eps=base.eps)]


def _form(
    batch: Callable[[int], GlobalBatch | LocalBatch], *, follow: Follow | None = None, **more: Any
) -> Form:
    def options(_: torch.optim.Optimizer) -> Mapping[str, Any]:
        return {"rule": AdamScale(), "follow": follow or Follow(), **more}

    return Form(batch=batch, optimizers=_adamw, options=options)


def _local(_: int) -> LocalBatch:
    return LocalBatch(12, micro_batches=2)


_CHANGES = ((1, 2, 4, 3),)
_ALL = Follow(betas="both", eps=True, weight_decay=True)

FEATURES = (
    Feature(
        name="AdamW",
        form=_form(grid_of(4)),
        job=Job(groups=_NUMBERS, adam=Adam()),
    ),
    Feature(
        name="AdamW, preconditioned gain",
        form=_form(grid_of(4)),
        job=Job(groups=_NUMBERS, adam=Adam(preconditions=True)),
    ),
    Feature(
        name="AdamW, preconditioned gain, uneven batches",
        form=_form(_local),
        job=Job(groups=_NUMBERS, adam=Adam(preconditions=True), num_samples=301),
    ),
    Feature(
        name="AdamW, betas, eps and decay follow, change of workers",
        form=_form(_local, follow=_ALL),
        job=Job(
            groups=_NUMBERS,
            adam=Adam(
                first_follows=True, second_follows=True, eps_follows=True, decay_follows=True
            ),
        ),
        worlds=_CHANGES,
    ),
    Feature(
        name="AdamW, squares of base batches",
        form=_form(grid_of(4), follow=Follow(second_moment="base")),
        job=Job(groups=_NUMBERS, adam=Adam(base_squares=True)),
    ),
    Feature(
        name="AdamW, squares of base batches, clipping, seldom measured",
        form=_form(grid_of(4), follow=Follow(second_moment="base"), max_norm=_MAX_NORM),
        job=Job(
            groups=_NUMBERS,
            adam=Adam(base_squares=True),
            max_norm=_MAX_NORM,
            measured_every=4,
        ),
    ),
    Feature(
        name="AdamW, all of these, change of workers",
        form=_form(_local, follow=Follow(betas="second", weight_decay=True, second_moment="base")),
        job=Job(
            groups=_NUMBERS,
            adam=Adam(
                preconditions=True, second_follows=True, decay_follows=True, base_squares=True
            ),
        ),
        worlds=_CHANGES,
    ),
)
