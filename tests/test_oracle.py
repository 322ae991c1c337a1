"""The table against the oracle, shortened; and that it would notice what is wrong."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.oracle.__main__ import rows_of
from benchmarks.oracle.features import FEATURES
from benchmarks.oracle.formulas import Averages, Ramp, gain_of, ramped
from benchmarks.oracle.job import MicroBatch, Window
from benchmarks.oracle.reference import follow
from benchmarks.oracle.rows import compare, failed
from benchmarks.oracle.subject import train
from benchmarks.oracle.worker import Case

ROOT = Path(__file__).parent.parent
PLAIN = FEATURES["plain"]
NUM_STEPS = 12


@cache
def record_of(name: str) -> dict[str, Any]:
    """Return the record of a feature with one worker, a few steps long."""
    feature = FEATURES[name]
    return train(feature.form, feature.job, num_steps=NUM_STEPS)


def row_of(name: str, record: dict[str, Any]) -> Any:
    feature = replace(FEATURES[name], happened=lambda _records: True)
    return compare(feature, [[record]])


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "plain, loss.backward()",
        "accumulation, another A each step and rank",
        "short last batch",
        "token weights",
        "summed loss",
        "measured every third step",
        "scaler",
        "clipping by max_norm",
        "parameter groups, a gain for each",
        "several optimizers",
        "two models, a summed loss",
        "lr as a tensor",
        "average of the weights",
        "tied and shared weights",
        "frozen, later unfrozen parameters",
        "activation checkpointing, reentrant",
        "BatchNorm",
        "SyncBatchNorm",
    ],
)
def test_one_worker_trains_as_the_oracle_says(name: str) -> None:
    row = row_of(name, record_of(name))
    assert row.ok, row
    assert row.bound == 1e-5


def spoilt(change: str) -> dict[str, Any]:
    record = deepcopy(record_of("plain"))
    last = record["windows"][-1]
    if change == "gain":
        last["gain"] *= 1 + 2e-5
    if change == "variance":
        last["moments"] = (last["moments"][0] * (1 + 2e-5), last["moments"][1])
    if change == "squared norm":
        last["moments"] = (last["moments"][0], last["moments"][1] * (1 - 2e-5))
    if change == "no moments":
        last["moments"] = None
    if change == "weights":
        moved = record["weights"] - record["start"]
        record["weights"] = record["weights"] + 2e-5 * moved
    if change == "samples":
        last["micro_batches"][0][0] = (last["micro_batches"][0][0] + 1) % 320
    return record


@pytest.mark.parametrize(
    "change", ["gain", "variance", "squared norm", "no moments", "weights", "samples"]
)
def test_an_error_of_two_in_a_hundred_thousand_is_noticed(change: str) -> None:
    assert not row_of("plain", spoilt(change)).ok


def test_a_row_whose_feature_did_not_take_place_is_not_ok() -> None:
    row = compare(FEATURES["accumulation, A=3"], [[record_of("plain")]])
    assert not row.ok
    assert row.why == "what the row is about did not take place"
    feature = replace(PLAIN, happened=lambda _records: False)
    assert not compare(feature, [[record_of("plain")]]).ok


def test_a_run_without_an_end_has_a_row_that_says_why() -> None:
    row = failed(PLAIN, (1, 2), why="it hung")
    assert (row.ok, row.gain_error, row.ranks, row.why) == (False, None, "1-2", "it hung")


def test_only_rows_of_low_precision_have_a_bound_of_their_own_and_say_why() -> None:
    other = {feature.name for feature in FEATURES.values() if feature.bound != 1e-5}
    assert other == {"bf16 autocast", "fp16 autocast with a scaler"}
    assert all(bool(feature.why) == (feature.name in other) for feature in FEATURES.values())


def test_the_oracle_finds_what_can_be_worked_out_by_hand() -> None:
    assert gain_of(3.0 * 8, 1.0, scale=3) == 2.0
    assert gain_of(8.0, -1.0, scale=3) == 3.0
    assert gain_of(-8.0, 1.0, scale=3) == gain_of(0.0, 0.0, scale=3) == 1.0
    averages = Averages()
    averages.add(2.0, 4.0, theta=0.75)
    assert averages.variance / averages.weight == 2.0
    averages.add(6.0, 0.0, theta=0.5)
    assert averages.variance / averages.weight == pytest.approx((0.125 * 2 + 0.5 * 6) / 0.625)


def test_the_oracles_ramp_climbs_an_eighth_a_step_and_falls_at_once() -> None:
    ramp = Ramp()
    climb = [ramped(ramp, 1.0, batch=8), *(ramped(ramp, 2.0, batch=16) for _ in range(18))]
    assert climb[:4] == [1.0, 1.0, 1.0625, 1.125]
    assert climb[-1] == 2.0
    assert ramped(ramp, 1.0, batch=8) == 1.0


def test_the_oracle_skips_poisoned_windows_whole() -> None:
    windows = [
        Window(
            number=number,
            micro_batches=(MicroBatch(rank=0, indices=(0, 1)), MicroBatch(rank=0, indices=(2, 3))),
            nominal_samples=4,
        )
        for number in range(3)
    ]
    whole = follow(PLAIN.job, windows[:2])
    skipped = follow(replace(PLAIN.job, poisoned=frozenset({1})), windows)
    assert torch.equal(whole.weights, skipped.weights)
    assert len(skipped.gains) == 2
    assert math.isclose(skipped.gains[1], whole.gains[1])


# BC-56
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_two_workers_train_as_the_oracle_says() -> None:
    names = (
        "scaler, unscaled and clipped by the user",
        "unused parameters",
        "SyncBatchNorm, uneven batches",
        "ZeRO",
    )
    rows = rows_of([Case(feature=name, worlds=(2,)) for name in names], limit_s=300)
    assert [row.ok for row in rows] == [True] * len(names), rows


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_the_command_writes_rows_and_fails_where_a_row_does(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.oracle", "--feature", "plain"]
    ran = subprocess.run(
        [*command, "--workers", "1", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads(path.read_text())["rows"]
    errors = [row.pop(f"{name}_error") for name in ("gain", "moment", "weight")]
    assert row == {"feature": "plain", "ranks": 1, "bound": 1e-5, "ok": True, "why": ""}
    assert all(0 < error < 1e-5 for error in errors)
