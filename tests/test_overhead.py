"""The benchmark of a step's price: its arithmetic, and each method that is here, in small."""

from __future__ import annotations

import json
import random

import pytest
from click.testing import CliRunner

from benchmarks.overhead import __main__ as overhead
from benchmarks.overhead import methods
from benchmarks.overhead.methods import ADAPTDL, METHODS, PLAIN, missing
from benchmarks.overhead.models import SUBJECTS
from benchmarks.overhead.rounds import Comparison, compare
from benchmarks.overhead.statistics import interval_of_mean, interval_of_median, ratio_row

ROW_KEYS = "model params processes method cpu_ratio cpu_q1 cpu_q3 wall_ratio rounds"
SIZES = {
    "cnn 0.09M": (0.09e6, 8),
    "mlp 0.1M in 82 tensors": (0.1e6, 82),
    "resnet 2.8M": (2.8e6, 62),
    "mlp 10M": (10e6, 8),
    "mlp 49M": (49e6, 10),
    "transformer 0.9M": (0.92e6, 51),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_models_have_the_sizes_that_they_are_named_after(name):
    subject = SUBJECTS[name]
    parameters = list(subject.build().parameters())
    size, num_tensors = SIZES[name]
    assert sum(p.numel() for p in parameters) == pytest.approx(size, rel=0.02)
    assert len(parameters) == num_tensors


def test_ratios_are_taken_round_by_round():
    row = ratio_row([2.0, 6.0, 2.0], [3.0] * 3, plain_cpu=[1.0, 2.0, 2.0], plain_wall=[2.0] * 3)
    assert (row["cpu_q1"], row["cpu_ratio"], row["cpu_q3"]) == (1.5, 2.0, 2.5)
    assert row["wall_ratio"] == 1.5
    assert not row["resolved"]


def test_the_interval_of_the_median_holds_it_about_as_often_as_it_says():
    source = random.Random(1)
    held = 0
    for seed in range(100):
        values = [source.gauss(1.0, 0.1) for _ in range(41)]
        low, high = interval_of_median(values, seed=seed)
        held += low <= 1.0 <= high
    assert held >= 85


def test_the_interval_of_the_mean_is_drawn_by_rounds_that_both_share():
    plain = [1.0, 2.0, 4.0, 8.0]
    assert interval_of_mean([3 * one for one in plain], plain) == pytest.approx((3.0, 3.0))
    low, high = interval_of_mean([1.0] * 15 + [17.0], [1.0] * 16)
    assert low < 2.0 < high


def test_a_peer_that_is_not_installed_is_a_named_gap(monkeypatch):
    monkeypatch.setattr(methods.importlib.util, "find_spec", lambda _: None)
    assert overhead.gaps(list(METHODS)) == {
        "fairscale": "fairscale is not installed: run scripts/peers",
        ADAPTDL: "adaptdl is not installed: run scripts/peers",
    }
    names = {
        name
        for one in overhead.comparisons(["cnn 0.09M"], list(METHODS), rounds=2, limit_s=9.0)
        for name in one.methods
    }
    assert names == set(METHODS) - {"fairscale", ADAPTDL}


def test_adaptdl_is_compared_where_it_makes_the_same_step():
    assert missing(ADAPTDL, processes=1, micro_batches=2) is not None
    assert missing(PLAIN, processes=1, micro_batches=2) is None


@pytest.mark.processes
@pytest.mark.parametrize(("processes", "micro_batches"), [(1, 2), (2, 2)])
def test_each_method_of_ours_makes_steps_beside_the_others(processes, micro_batches):
    own = [name for name in METHODS if name not in {"fairscale", ADAPTDL}]
    comparison = Comparison(
        model="mlp 0.1M in 82 tensors",
        batch=4,
        processes=processes,
        micro_batches=micro_batches,
        methods=own,
        rounds=2,
        limit_s=9.0,
    )
    rows = overhead.rows_of(comparison, compare(comparison))
    assert [row["method"] for row in rows] == [name for name in own if name != PLAIN]
    assert all(0 < row["cpu_ratio"] < 50 for row in rows)
    assert all(row.keys() >= {*ROW_KEYS.split()} for row in rows)


def test_the_command_writes_rows(monkeypatch):
    times = {"cpu": [1.0, 1.0], "wall": [1.0, 1.0]}
    monkeypatch.setattr(
        overhead,
        "compare",
        lambda one: {"steps": 4, "times": dict.fromkeys(one.methods, times)},
    )
    options = ["--json", "-", "--model", "cnn 0.09M", "--method", "elastane", "--rounds", "2"]
    written = CliRunner().invoke(overhead.main, options, catch_exceptions=False)
    rows = json.loads(written.stdout)["rows"]
    assert {row["method"] for row in rows} == {"plain again", "elastane"}
    assert {(row["batch"], row["processes"], row["micro_batches"]) for row in rows} == {
        *((32, 1, 2), (32, 2, 1), (32, 2, 4)),
        *((256, 1, 2), (256, 2, 1)),
    }


def test_a_run_that_was_interrupted_goes_on_where_it_stopped(monkeypatch, tmp_path):
    times = {"cpu": [1.0, 1.0], "wall": [1.0, 1.0]}
    compared = []

    def stop_after(count, one):
        if len(compared) == count:
            raise KeyboardInterrupt
        compared.append((one.batch, one.processes, one.micro_batches))
        return {"steps": 4, "times": dict.fromkeys(one.methods, times)}

    path = tmp_path / "overhead.json"
    options = ["--json", str(path), "--model", "cnn 0.09M", "--method", "elastane", "--resume"]
    for count in (2, 9):
        monkeypatch.setattr(overhead, "compare", lambda one, count=count: stop_after(count, one))
        CliRunner().invoke(overhead.main, options)
    assert len(compared) == len(set(compared)) == 5
    assert len(json.loads(path.read_text())["rows"]) == 10
