"""Measures the variance of the weights' updates around a change of batch.

Knows a saved state and a ramp; the model that this is compared with is in `measure`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from benchmarks.dynamic_sgd.measure import update_variances
from benchmarks.dynamic_sgd.ramps import RAMPS, applied_by
from benchmarks.runs.subject import Bench, Conditions, set_up, steps_of, subject_of
from elastane import Linear

__all__ = ["measure_noise"]

_BEFORE_STEPS = 5
_FIRST_ORDER = 1_000


def measure_noise(spec: Mapping[str, Any], needs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variance of updates after a change, over that just before it.

    Replicas go on from one saved state with samples in orders of their own. After so many steps
    that their buffers have nothing in common, the batch changes; the variance over the replicas of
    each step's update, summed over all weights, is what is measured. Its ratio is given relative
    to `k`, where linear scaling settles, as is the noise model's.
    """
    (began,) = needs.values()
    point = began["points"].get(spec["when"])
    if point is None:
        return {"no_start": True}
    ratio = spec["after"] / spec["before"]
    variances = _variances(spec, point)
    before = sum(variances[:_BEFORE_STEPS]) / _BEFORE_STEPS
    ramp = RAMPS[spec["ramp"]]
    known = {"ratio": ratio, "momentum": spec["momentum"]}
    predicted = update_variances(applied_by(ramp, steps=spec["horizon"], **known), **known)
    return {
        "no_start": False,
        "predicted": [value / ratio for value in predicted],
        "measured": [value / before / ratio for value in variances[_BEFORE_STEPS:]],
    }


def _variances(spec: Mapping[str, Any], point: Mapping[str, Any]) -> list[float]:
    """Return the variances of the last updates before the change and of those after it."""
    sums: list[Tensor] = []
    squares: list[float] = []
    for replica in range(spec["replicas"]):
        for place, update in enumerate(_updates(spec, point, order=_FIRST_ORDER + replica)):
            if replica == 0:
                sums.append(torch.zeros_like(update))
                squares.append(0.0)
            sums[place] += update
            squares[place] += update.square().sum().item()
    count = spec["replicas"]
    return [
        (square - total.square().sum().item() / count) / (count - 1)
        for square, total in zip(squares, sums, strict=True)
    ]


def _updates(spec: Mapping[str, Any], point: Mapping[str, Any], *, order: int) -> Iterator[Tensor]:
    """Yield the last updates before the change, and those after it."""
    bench = _bench(spec, point, order=order)
    ramp, ratio = RAMPS[spec["ramp"]], spec["after"] / spec["before"]
    with bench.session:
        weights = _weights(bench)
        for step, _ in enumerate(steps_of(bench), start=1):
            weights, last = _weights(bench), weights
            if step > spec["settle"] - _BEFORE_STEPS:
                yield weights - last
            if step == spec["settle"]:
                bench.batch.scale = spec["after"]
                ramp.change(bench.optimizer, ratio=ratio)
            if step == spec["settle"] + spec["horizon"]:
                return


def _bench(spec: Mapping[str, Any], point: Mapping[str, Any], *, order: int) -> Bench:
    conditions = Conditions(
        seed=spec["seed"],
        rule=Linear(),
        scale=spec["before"],
        compensation=RAMPS[spec["ramp"]].compensation,
        momentum=spec["momentum"],
        held_at=point["part"],
        order=order,
        measure=False,
    )
    bench = set_up(subject_of(spec["task"], quick=spec["quick"]), conditions)
    states = torch.load(Path(spec["folder"], point["file"]), weights_only=True)
    bench.model.load_state_dict(states["model"])
    lr = bench.optimizer.param_groups[0]["lr"]
    bench.optimizer.load_state_dict(states["optimizer"])
    bench.optimizer.param_groups[0]["lr"] = lr
    return bench


@torch.no_grad()
def _weights(bench: Bench) -> Tensor:
    return parameters_to_vector(bench.model.parameters()).double()
