"""Features of mixed precision: bf16, and fp16 with its loss scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_

from benchmarks.oracle.features.feature import Feature, Record, grid_of
from benchmarks.oracle.job import Job
from benchmarks.oracle.subject import Form, Turn, backward

__all__ = ["FEATURES"]

_MAX_NORM = 0.55


def _autocast(dtype: torch.dtype) -> Callable[[Turn], None]:
    def turn(now: Turn) -> None:
        with torch.autocast("cpu", dtype=dtype):
            loss = now.loss()
        now.session.backward(loss)

    return turn


def _unscaled_by_hand(now: Turn) -> None:
    backward(now)
    if now.session.is_last_micro_batch:
        assert now.scaler is not None
        now.scaler.unscale_(now.optimizer)
        clip_grad_norm_(now.session.model.parameters(), _MAX_NORM)


def _scaled_by_hand(now: Turn) -> None:
    assert now.scaler is not None
    now.scaler.scale(now.loss()).backward()


def _scaler(_optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    return {"scaler": GradScaler("cpu", init_scale=2.0**10, growth_interval=8)}


def _scale_moved(records: Sequence[Record]) -> bool:
    """Return whether the scale was halved and doubled, and skipped steps moved nothing."""
    for record in records:
        windows = record["windows"]
        pairs = list(pairwise(window["loss_scale"] for window in windows))
        if not any(a < b for a, b in pairs) or not any(a > b for a, b in pairs):
            return False
        if any(window["skipped"] == window["moved"] for window in windows):
            return False
    return all(sum(window["skipped"] for window in record["windows"]) == 2 for record in records)


_POISONED = Job(poisoned=frozenset({6, 20}))

FEATURES = (
    Feature(
        name="bf16 autocast",
        form=Form(batch=grid_of(4), turn=_autocast(torch.bfloat16)),
        bound=2.0**-8,
        why="numbers are rounded to 8 bits, each by up to 2^-9; twice as much is let pass",
    ),
    Feature(
        name="fp16 autocast with a scaler",
        form=Form(batch=grid_of(4), options=_scaler, turn=_autocast(torch.float16)),
        job=_POISONED,
        bound=2.0**-11,
        why="numbers are rounded to 11 bits, each by up to 2^-12; twice as much is let pass",
        happened=_scale_moved,
    ),
    Feature(
        name="scaler",
        form=Form(batch=grid_of(4), options=_scaler),
        job=_POISONED,
        happened=_scale_moved,
    ),
    Feature(
        name="scaler, loss scaled by the user",
        form=Form(batch=grid_of(4), options=_scaler, turn=_scaled_by_hand),
        job=_POISONED,
        happened=_scale_moved,
    ),
    Feature(
        name="scaler, unscaled and clipped by the user",
        form=Form(batch=grid_of(4), options=_scaler, turn=_unscaled_by_hand),
        job=replace(_POISONED, max_norm=_MAX_NORM),
        happened=_scale_moved,
    ),
)
