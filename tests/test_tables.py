"""The tables' drivers on a task of this file: plans, ledgers, runs, rows, the page of results."""

import json
import math
import os
from functools import cache, partial
from itertools import islice, pairwise, repeat
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.adascale import __main__ as adascale_table
from benchmarks.adascale import plan as adascale_plan
from benchmarks.adascale import rows as adascale_rows
from benchmarks.adascale import worker
from benchmarks.adascale import workers as real_workers
from benchmarks.adascale.rules import SELDOM, TRIED, Stretched, rule_of
from benchmarks.adascale.runs import Predictor, measure_gain, train_once
from benchmarks.dynamic_sgd import __main__ as dynamic_table
from benchmarks.dynamic_sgd import grid, measure, ramps
from benchmarks.dynamic_sgd import rows as dynamic_rows
from benchmarks.dynamic_sgd.noise import measure_noise
from benchmarks.dynamic_sgd.runs import branch, finish, start
from benchmarks.dynamic_sgd.workers import change_on_workers, place_of_change
from benchmarks.launched import JobError
from benchmarks.results_page import adascale as adascale_section
from benchmarks.results_page.__main__ import write_page
from benchmarks.results_page.verdicts import default_against_jump, judge_scales
from benchmarks.runs import subject as subjects
from benchmarks.runs.calibration import predicted_s
from benchmarks.runs.driver import available
from benchmarks.runs.ledger import Entry, Ledger, Run
from benchmarks.runs.pool import carry_out, workers
from benchmarks.runs.subject import (
    Conditions,
    DivergedError,
    ScaledBatch,
    Subject,
    set_up,
    steps_of,
)
from benchmarks.runs.training import has_learnt, mean_blocks, train
from benchmarks.tasks import TASKS, load_task
from benchmarks.tasks.task import Data, Recipe, Task
from elastane import Linear
from elastane.batching import World
from elastane.noise import Moments, gain


@cache
def load(quick):
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    labels = torch.from_numpy(digits.target).long()
    few = 400 if quick else 1_400
    train = TensorDataset(images[:few], labels[:few])
    return Data(train=train, validation=TensorDataset(images[1_400:], labels[1_400:]))


def build():
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def evaluate(model, data):
    images, labels = data.validation.tensors
    with torch.no_grad():
        logits = model(images)
    hits = (logits.argmax(1) == labels).float().mean()
    return {"accuracy": hits.item(), "loss": F.cross_entropy(logits, labels).item()}


RECIPE = Recipe(
    base_batch_size=8,
    num_steps=120,
    lr=0.1,
    momentum=0.9,
    weight_decay=0.0,
    schedule=lambda part: 1 - part,
    tried="",
)

TASK = Task(
    name="tests.test_tables",
    title="two layers on small digits",
    metric="accuracy",
    higher_is_better=True,
    recipe=RECIPE,
    quick_recipe=RECIPE,
    load=load,
    build=build,
    loss=loss,
    evaluate=evaluate,
    missing=lambda: None,
)

NAME = TASK.name
ADASCALE_KEYS = """task rule scale seeds metric higher_is_better metric_mean metric_sd
    train_loss_mean steps_mean mean_gain diverged"""
DYNAMIC_KEYS = """task k when momentum ramp seeds peak_ratio_mean recover_steps_mean metric_mean
    metric_sd diverged"""


def subject(**changes):
    recipe = Recipe(**{name: getattr(RECIPE, name) for name in Recipe.__slots__} | changes)
    return Subject(task=TASK, recipe=recipe, data=load(True))


def trained(rule, *, scale, seed=0, **needs):
    spec = {"task": NAME, "quick": True, "seed": seed, "rule": rule, "scales": [[0.0, scale]]}
    return train_once(spec, needs)


def write_a_line(spec, needs):
    """Carry out a run of the tests below: leave a line behind, and end as the spec says."""
    with Path(spec["file"]).open("a") as file:
        file.write(spec["line"] + "\n")
    if spec["end"] == "dies":
        os._exit(3)
    if spec["end"] == "raises":
        raise ValueError("so it was asked")
    return {"needs": sorted(needs)}


def run_of(name, *, file="", end="well", needs=()):
    spec = {"task": NAME, "file": str(file), "line": name, "end": end}
    return Run(name=name, does="write_a_line", spec=spec, needs=needs, group=name)


def ledger_of(folder, **options):
    return Ledger(folder=folder, settings={"benchmark": "test", "quick": True}, **options)


# --- tasks, plans ---


def test_a_task_is_one_of_the_list_or_a_module_of_ones_own():
    assert load_task("tests.test_tables").name == NAME
    assert "mnist" in TASKS
    with pytest.raises(click.UsageError, match="no task 'mnits': choose one of fashion"):
        load_task("mnits")
    with pytest.raises(click.ClickException, match="can't be loaded"):
        load_task("tests.no_such_module")


def test_the_adascale_plan_has_as_many_runs_as_the_table_asks_for():
    plan = adascale_plan.make_plan([NAME], scales=None, seeds=None, quick=False)

    fixed, few, changes, noise = 5 + 2 * 3 * 5, 4 * 2 * 3, 2 * 3 * 3, 3
    assert len(plan.runs) == fixed + few + changes + noise
    assert len({run.name for run in plan.runs}) == len(plan.runs)
    rules = {(cell.rule, cell.scale): len(names) for cell, names in plan.cells.items()}
    assert rules["adascale", 64] == rules["lsw", 1] == 5
    assert rules["lsw+", 16] == rules["identity", 64] == rules["adascale", "8-16-32"] == 3
    assert ("sqrt", 4) not in rules


def test_with_a_single_base_batch_all_rules_are_one_run():
    plan = adascale_plan.make_plan([NAME], scales=(1, 2), seeds=1, quick=True)

    one, other = (adascale_plan.Cell(task=NAME, rule=r, scale=1) for r in ("adascale", "lsw"))
    assert plan.cells[one] == plan.cells[other]
    assert len(plan.runs) == 1 + 2 + 1


def test_what_is_tried_on_a_task_is_a_run_of_its_own_at_s_1_too():
    plan = adascale_plan.make_plan(["translation"], scales=(1, 16), seeds=1, quick=False)
    rule = "adascale, momentum 0.9"
    tried, base = (adascale_plan.Cell(task="translation", rule=r, scale=1) for r in (rule, "lsw"))

    assert plan.cells[tried] != plan.cells[base]
    assert {cell.scale for cell in plan.cells if cell.rule == rule} == {1, 16}


def test_what_is_tried_changes_what_it_says(monkeypatch):
    usual = trained("adascale", scale=4)
    monkeypatch.setitem(TRIED, "adascale, momentum 0.9", {"momentum": 0.5})

    assert trained("adascale, momentum 0.9", scale=4)["trace"]["lr"][0] == pytest.approx(
        5 * usual["trace"]["lr"][0]
    )
    assert trained("adascale, no average", scale=4)["trace"]["gain"] != usual["trace"]["gain"]


def test_runs_that_need_others_name_them():
    plan = adascale_plan.make_plan([NAME], scales=(16,), seeds=2, quick=False)

    names = {run.name for run in plan.runs}
    for run in plan.runs:
        assert set(run.needs) <= names
        assert bool(run.needs) == (run.spec.get("rule") == "lsw+")


def test_the_dynamic_plan_has_the_full_grid_for_one_task_and_a_part_for_the_others(tmp_path):
    full = grid.grid_of("mnist", quick=False)
    make = partial(grid.make_plan, folder=tmp_path, ratios=None, seeds=None, quick=False)
    part = make([NAME])

    assert (full.ratios, len(full.when), full.momenta) == ((2, 4, 16), 3, (0.9, 0.99))
    assert set(full.ramps) == set(ramps.RAMPS)
    assert len(part.branches) == 2 * 5 + 2 * 4  # one ramp is for growth alone
    assert sum(run.does == "branch" for run in part.runs) == (2 * 5 + 2 * 4) * 3
    assert sum(run.does == "start" for run in part.runs) == 3 * 3  # scales 1, 4 and 16
    ends = {"immediate", "T=8k", "T=8k, velocity kept", "noise-matched"}
    assert {cell.ramp for cell in part.finishes} <= ends


def test_a_task_that_lacks_something_is_left_out_and_named(monkeypatch):
    lacking = {name: getattr(TASK, name) for name in Task.__slots__} | {"missing": lambda: "apples"}
    monkeypatch.setattr("tests.test_tables.TASK", Task(**lacking))

    found = available([NAME, "tests.no_such_module"], console=Console(quiet=True))

    assert found[0] == []
    assert found[1][NAME] == "apples"
    assert "no_such_module" in found[1]["tests.no_such_module"]
    with pytest.raises(click.UsageError):
        available(["mnits"], console=Console(quiet=True))


# --- ledger, pool ---


def test_a_ledger_that_is_there_is_refused_with_the_way_out_unless_it_is_to_be_resumed(tmp_path):
    ledger_of(tmp_path).add(Entry(name="a", group="g", record={"x": 1}))

    with pytest.raises(click.ClickException, match=r"--resume.*--out"):
        ledger_of(tmp_path)
    assert ledger_of(tmp_path, resume=True).record("a") == {"x": 1}
    with pytest.raises(click.ClickException, match="is of"):
        Ledger(folder=tmp_path, settings={"benchmark": "other"}, resume=True)


def test_a_line_that_was_cut_off_is_dropped_and_the_next_one_is_whole(tmp_path):
    ledger_of(tmp_path).add(Entry(name="a", group="g", record={}))
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"name": "b", "gro')

    ledger_of(tmp_path, resume=True).add(Entry(name="c", group="g", record={}))

    names = [entry.name for entry in ledger_of(tmp_path, resume=True).entries]
    assert names == ["a", "c"]


def test_a_run_whose_files_are_gone_is_made_again(tmp_path):
    ledger = ledger_of(tmp_path)
    (tmp_path / "kept").touch()
    for name in ("kept", "gone"):
        ledger.add(Entry(name=name, group="g", record={"files": [name]}))

    resumed = ledger_of(tmp_path, resume=True)
    assert [entry.name for entry in resumed.entries] == ["kept"]


@pytest.mark.processes
def test_runs_that_fail_or_die_are_recorded_and_a_resume_runs_nothing_twice(tmp_path):
    file = tmp_path / "lines"
    runs = [
        run_of("late", file=file, needs=("early",)),
        run_of("raises", file=file, end="raises"),
        run_of("dies", file=file, end="dies"),
        run_of("hopeless", file=file, needs=("dies",)),
        run_of("early", file=file),
    ]
    ledger = ledger_of(tmp_path / "out")
    with workers("tests.test_tables", count=1, folder=tmp_path) as by:
        carry_out(runs, ledger=ledger, by=by)

    assert ledger.record("late") == {"needs": ["early"]}
    assert ledger.failure("raises") == "ValueError: so it was asked"
    assert ledger.failure("dies") == "its process ended with exit code 3"
    assert ledger.failure("hopeless") == "it needs 'dies', which failed"
    first = file.read_text().split()
    assert sorted(first) == ["dies", "early", "late", "raises"]

    resumed = ledger_of(tmp_path / "out", resume=True)
    with workers("tests.test_tables", count=1, folder=tmp_path) as by:
        carry_out(runs, ledger=resumed, by=by)

    assert sorted(file.read_text().split()[len(first) :]) == ["dies", "raises"]


def test_nothing_starts_once_the_budget_is_spent(tmp_path):
    ledger = ledger_of(tmp_path)

    with workers("none", count=2, folder=tmp_path) as by:
        carry_out([run_of("a")], ledger=ledger, by=by, may_start=lambda: False)

    assert ledger.entries == []


def test_a_run_is_predicted_to_cost_what_others_of_its_group_did(tmp_path):
    ledger = ledger_of(tmp_path)
    ledger.add(Entry(name="a", group="a", record={}, process_s=7.0))
    costs = {"base_step_s": 0.01, "evaluation_s": 0.5}
    ledger.add(Entry(name=f"calibrate {NAME}", group="calibrate", record=costs))
    unknown = Run(name="b", does="", spec={"task": NAME}, group="b", base_steps=100, evaluations=4)
    known = Run(name="c", does="", spec={"task": NAME}, group="a")

    assert predicted_s([run_of("a"), known, unknown], ledger=ledger) == {NAME: 7.0 + 3.0}


# --- training ---


def test_a_scaled_batch_deals_a_base_batch_to_each_emulated_worker_and_can_change():
    policy = ScaledBatch(8, scale=4)
    assert policy.batch_samples(1) == 32
    assert len(policy.deal(0, 32, world=World(), min_samples=1)) == 4

    policy.scale = 2
    assert policy.batch_samples(3) == 48
    last = policy.deal(0, 48, world=World(rank=2, world_size=3), min_samples=1)
    assert last == [(32, 40), (40, 48)]


def test_a_scaled_batch_takes_workers_together_whose_own_gradients_nobody_wants():
    together = ScaledBatch(8, scale=40, most_samples=128)
    assert together.deal(0, 320, world=World(), min_samples=1) == [(0, 107), (107, 214), (214, 320)]
    together.scale = 2
    assert together.deal(0, 16, world=World(), min_samples=1) == [(0, 16)]


@pytest.mark.parametrize("scale", [4, 40])
def test_workers_that_are_taken_together_train_the_same_weights(scale, monkeypatch):
    def weights():
        conditions = Conditions(seed=0, rule=Linear(), scale=scale, measure=False)
        bench = set_up(subject(), conditions)
        with bench.session:
            list(islice(steps_of(bench), 5))
        return torch.cat([p.detach().flatten() for p in bench.model.parameters()])

    together = weights()
    monkeypatch.setattr(subjects, "_MOST_SAMPLES", 0)
    torch.testing.assert_close(together, weights(), rtol=1e-5, atol=1e-7)


def test_the_scale_changes_where_the_run_has_come_to_the_parts_asked_for():
    conditions = Conditions(seed=0, rule=Linear(), scale=2)

    course = train(subject(), conditions, changes=[(0.25, 4), (0.5, 1)], points=4)

    for tau, batch in zip(course.trace["tau"], course.trace["batch"], strict=True):
        assert batch == 8 * (2 if tau < 30 else 4 if tau < 60 else 1)
    assert [tau for tau, *_ in course.curve] == [30, 62, 90, 120]  # 62 is 30 and 8 steps of 4


def test_a_run_is_the_same_each_time():
    one, other = (train(subject(), Conditions(seed=3, rule=rule_of("adascale"))) for _ in "ab")

    assert one.record() == other.record()


def test_a_run_whose_loss_is_not_finite_has_diverged_and_one_that_unlearnt_too():
    wild = train(subject(lr=1e6), Conditions(seed=0, rule=Linear()))
    dead = train(subject(lr=0.0), Conditions(seed=0, rule=Linear()))
    good = train(subject(), Conditions(seed=0, rule=Linear()))

    assert (wild.diverged, dead.diverged, good.diverged) == (True, True, False)
    assert dead.metric is not None
    assert not has_learnt(2.3, untrained=math.log(10))


def test_a_loss_that_is_not_finite_ends_the_run_at_once():
    def broken(model, batch):
        return model(batch[0]).mean() * math.nan

    task = Task(**{name: getattr(TASK, name) for name in Task.__slots__} | {"loss": broken})
    bench = set_up(
        Subject(task=task, recipe=RECIPE, data=load(True)), Conditions(seed=0, rule=Linear())
    )
    with bench.session, pytest.raises(DivergedError):
        next(steps_of(bench))


def test_another_momentum_comes_with_a_rate_that_is_worth_as_much():
    bench = set_up(subject(), Conditions(seed=0, rule=Linear(), momentum=0.99))

    assert bench.optimizer.param_groups[0]["lr"] == pytest.approx(RECIPE.lr / 10)


def test_a_trace_is_shortened_to_means_of_blocks():
    assert mean_blocks({"a": [1, 2, 3, 4, 5]}, most=2) == {"a": [2, 4.5]}
    assert mean_blocks({"a": [1.23456789]}, most=2) == {"a": [1.23457]}


# --- AdaScale ---


def test_lsw_takes_the_base_runs_steps_over_s_and_lsw_plus_as_many_as_adascale():
    own = trained("adascale", scale=4)
    linear = trained("lsw", scale=4)
    stretched = trained("lsw+", scale=4, adascale=own)

    assert linear["steps"] == 120 / 4
    assert 30 < own["steps"] < 120
    assert stretched["steps"] == own["steps"]
    assert max(stretched["trace"]["lr"]) > 3 * RECIPE.lr > max(own["trace"]["lr"])


@pytest.mark.parametrize("steps", [1, 7, 97, 1_409])
def test_a_stretched_run_ends_with_its_last_step_and_not_before(steps):
    rule = Stretched(steps=steps)
    bench = set_up(subject(num_steps=4_999, lr=0.0), Conditions(seed=0, rule=rule, scale=2))
    controller = bench.session._loop.stepper.controller

    for _ in range(steps):
        assert not controller.finished
        decision = controller.decide(None, batch_samples=16, nominal_samples=16, momentum=0.9)
        controller.commit(decision)
    assert controller.finished


def test_identity_keeps_the_scheduled_rate_and_progresses_by_the_gain():
    bench = set_up(subject(), Conditions(seed=0, rule=rule_of("identity"), scale=8))

    with bench.session:
        for result in islice(steps_of(bench), 12):
            scheduled = RECIPE.lr * RECIPE.schedule(result.previous_progress / 120)
            assert result.lr == pytest.approx(scheduled)
            assert result.progress - result.previous_progress == pytest.approx(result.gain)
    assert result.gain > 1


def test_steady_noise_predicts_its_own_gain():
    class Result:
        moments = Moments(variance=64.0, sqr_norm=1.0)
        previous_progress = 3.0

    predictor = Predictor(base_batch_size=8)
    for _ in range(500):
        predictor.watch(Result())

    steady = gain(Result.moments, scale=16, base_batch_size=8)
    steps = 1 + math.ceil(499 / steady)  # the first step has no gain yet
    assert predictor.mean_gain(16) == pytest.approx(500 / steps)


def test_the_noise_of_single_base_batches_is_measured_in_two_halves():
    found = measure_gain({"task": NAME, "quick": True, "seed": 0}, {})

    assert 1 < found["gains"]["2"] < 2 < found["gains"]["16"] < 16


def test_random_schedules_are_those_of_their_seed_and_change_with_every_entry():
    for seed in range(20):
        sizes = real_workers.random_sizes(seed)
        assert sizes == real_workers.random_sizes(seed)
        assert sizes == sorted(sizes)
        assert all(a != b for (_, a), (_, b) in pairwise(sizes))
        assert {size for _, size in sizes} <= {1, 2, 3, 4}


def test_a_worker_trains_the_task_and_writes_what_came_of_it(tmp_path, monkeypatch):
    setup = {"task": NAME, "quick": True, "seed": 0, "step_s": 0.0}
    (tmp_path / real_workers.SETUP_NAME).write_text(json.dumps(setup))
    monkeypatch.setattr("sys.argv", ["worker", str(tmp_path)])

    worker.main()

    found = json.loads((tmp_path / real_workers.RESULT_NAME).read_text())
    assert found["metric"] == trained("adascale", scale=1)["metric"]
    assert found["diverged"] is False


def test_the_events_of_a_run_on_workers_tell_its_steps_and_sizes(tmp_path):
    steps = [(10, 1), (20, 1), (32, 2), (48, 4), (100, 4)]
    lines = [{"event": "start"}] + [
        {"event": "step", "step": n, "progress": tau, "world_size": size, "loss": float(n)}
        for n, (tau, size) in enumerate(steps, start=1)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "events.jsonl").write_text(text + '{"event": "st')

    found = real_workers.summary(real_workers.steps_in(tmp_path / "events.jsonl"), num_steps=100)

    assert found == {"steps": 5, "train_loss": 5.0, "sizes": [[0.1, 1], [0.32, 2], [0.48, 4]]}


def test_adascale_rows_count_diverged_runs_and_average_the_others(tmp_path):
    plan = adascale_plan.make_plan([NAME], scales=(2,), seeds=2, quick=True)
    ledger = ledger_of(tmp_path)
    cell = adascale_plan.Cell(task=NAME, rule="adascale", scale=2)
    shared = {"num_steps": 120, "train_loss": 0.5, "curve": [[120, 0.9, 0.1]]}
    ends = [{"metric": 0.9, "steps": 80, "diverged": False}, {"metric": None, "diverged": True}]
    for name, end in zip(plan.cells[cell], ends, strict=True):
        ledger.add(Entry(name=name, group="g", record=shared | end))

    (row,) = adascale_rows.make_rows(plan, ledger=ledger)

    assert set(ADASCALE_KEYS.split()) < set(row)
    assert (row["seeds"], row["diverged"], row["metric_mean"]) == (2, 1, 0.9)
    assert row["mean_gain"] == 1.5
    assert row["metric_sd"] is None


# --- Dynamic SGD ---


def test_keeping_the_velocity_divides_the_momentum_buffers_by_the_ratio():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.full((3,), 8.0)
    optimizer.step()

    ramps.RAMPS["immediate"].change(optimizer, ratio=4)
    assert optimizer.state[weight]["momentum_buffer"].tolist() == [8.0] * 3
    ramps.RAMPS["velocity kept"].change(optimizer, ratio=4)
    assert optimizer.state[weight]["momentum_buffer"].tolist() == [2.0] * 3


def test_the_default_is_one_of_the_ramps_that_are_compared():
    for ratio in (2, 4, 16, 1 / 2, 1 / 4, 1 / 16):
        for momentum in (0.9, 0.99):
            found = ramps.default_ramp(ratio, momentum=momentum)
            assert found == (ramps.KEPT_RAMP if ratio > 1 else ramps.IMMEDIATE)


@pytest.mark.parametrize(
    ("ratio", "name", "peak"),
    [
        (2, "immediate", 1.81),
        (16, "immediate", 13.2),
        (1 / 4, "immediate", 1.0),
        (16, "velocity kept", 1.0),
        (1 / 4, "velocity kept", 3.43),
        (1 / 16, "noise-matched", 1.0),
        (16, "T=8k, velocity kept", 1.0),
    ],
)
def test_the_noise_model_has_the_peaks_that_were_computed_for_it(ratio, name, peak):
    ramp = ramps.RAMPS[name]
    steps = ramps.applied_by(ramp, ratio=ratio, momentum=0.9, steps=300)

    variances = measure.update_variances(steps, ratio=ratio, momentum=0.9)

    assert max(variances) / ratio == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize(("ratio", "peak"), [(4, 1.56), (16, 3.78), (1 / 4, 5.37), (1 / 16, 57.8)])
def test_the_noise_model_knows_equation_6_whose_first_new_step_has_left_the_old_rate(ratio, peak):
    factors = [1 + min(step / 8, 1) * (ratio - 1) for step in range(1, 300)]

    variances = measure.update_variances(zip(factors, repeat(1.0)), ratio=ratio, momentum=0.9)

    assert max(variances) / ratio == pytest.approx(peak, rel=0.01)


def test_peak_and_recovery_are_those_of_running_means():
    before, after = [1.0] * 5, [1.0, 6.0, *[1.0] * 8]

    assert measure.peak_ratio(before, after) == 2.0
    assert measure.recover_steps(before, after) == 6
    assert measure.recover_steps(before, [1.0] * 10) == 0
    assert measure.recover_steps(before, [2.0] * 10) == 10


def change_spec(ramp, *, folder, before=1, after=4):
    change = {"before": before, "after": after, "when": "middle", "momentum": 0.9, "ramp": ramp}
    run = {"task": NAME, "quick": True, "seed": 0, "horizon": 12, "folder": str(folder)}
    return run | change


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ledger")


@pytest.fixture(scope="module")
def began(folder):
    spec = {"name": "state", "scale": 1, "points": {"middle": 0.5}}
    return start(change_spec("immediate", folder=folder) | spec, {})


def test_all_ramps_go_on_from_one_state(began, folder):
    found = {
        name: branch(change_spec(name, folder=folder), {"start": began})
        for name in ("unchanged", "immediate", "T=8", "velocity kept")
    }

    assert began["points"]["middle"]["part"] == 0.5
    assert all(len(one["after"]) == 12 and not one["diverged"] for one in found.values())
    assert len({one["after"][-1] for one in found.values()}) == 4
    assert found["unchanged"]["after"][0] == found["T=8"]["after"][0]  # the ramp begins at the old


def test_a_run_goes_on_to_its_end_and_is_evaluated(began, folder):
    found = finish(change_spec("T=8k", folder=folder), {"start": began})

    assert 0.5 < found["metric"] <= 1
    assert not found["diverged"]


def test_a_change_without_a_state_before_it_is_counted_as_that(tmp_path):
    nothing = {"points": {}, "untrained": 2.3}
    assert branch(change_spec("T=8", folder=tmp_path), {"start": nothing}) == {"no_start": True}

    plan = grid.make_plan([NAME], folder=tmp_path, ratios=(4,), seeds=1, quick=False)
    ledger = ledger_of(tmp_path)
    (cell, (name,)), *_ = plan.branches.items()
    ledger.add(Entry(name=name, group="g", record={"no_start": True}))
    (row,) = dynamic_rows.make_rows(plan, ledger=ledger)

    assert set(DYNAMIC_KEYS.split()) < set(row)
    assert (row["k"], row["seeds"], row["no_start"], row["diverged"]) == (cell.k, 0, 1, 0)


def test_the_variance_of_updates_jumps_with_an_immediate_change_and_not_with_a_matched_one(
    began, folder
):
    sizes = {"replicas": 6, "settle": 30, "horizon": 4, "after": 16}
    jump, matched = (
        measure_noise(change_spec(ramp, folder=folder) | sizes, {"start": began})
        for ramp in ("immediate", "noise-matched")
    )

    assert jump["predicted"][0] == pytest.approx(13.2, rel=0.01)
    assert matched["predicted"][0] == pytest.approx(1.0)
    assert jump["measured"][0] > 5 * matched["measured"][0]


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_change_on_real_workers_does_to_the_loss_what_the_emulated_one_does(
    before, after, tmp_path
):
    spec = change_spec("T=8k", folder=tmp_path, before=before, after=after)
    began = start({**spec, "name": "state", "scale": before, "points": {"middle": 0.5}}, {})

    found = change_on_workers(spec, {"start": began})

    assert (found["diverged"], found["sizes"][0][0]) == (False, after)
    assert found["sizes"][0][1] >= spec["horizon"]
    assert found["difference"] < 1e-4
    assert found["peak_ratio"] == pytest.approx(found["emulated_peak_ratio"], rel=1e-4)


def test_a_change_is_that_of_the_workers_that_were_asked_for_not_of_those_that_came_late():
    assert place_of_change([4] * 7 + [1] * 3, before=4) == 7
    assert place_of_change([3] * 2 + [4] * 5 + [1], before=4) == 7
    assert place_of_change([1] * 9 + [2, 4, 4], before=1) == 9
    for sizes in ([4] * 9, [4] * 4 + [1] * 3):
        with pytest.raises(JobError, match="number of workers stayed 4"):
            place_of_change(sizes, before=4)


def test_changes_on_workers_are_of_one_kind_and_become_rows(tmp_path):
    plan = grid.make_plan(["mnist"], folder=tmp_path, ratios=None, seeds=None, quick=False)
    ledger = ledger_of(tmp_path)
    cell, names = next(iter(plan.on_workers.items()))
    good = {"no_start": False, "diverged": False, "sizes": [[4, 200]], "difference": 1e-6}
    good |= {"peak_ratio": 1.5, "emulated_peak_ratio": 1.25}
    records = [good, good | {"peak_ratio": 2.5}, {"no_start": False, "diverged": True, "sizes": []}]
    for name, record in zip(names, records, strict=True):
        ledger.add(Entry(name=name, group="g", record=record))

    (row,) = dynamic_rows.on_workers(plan, ledger=ledger)

    assert len(plan.worker_runs) == (7 + 6) * 3
    assert all(max(one.k, 1 / one.k) == 4 and one.when == "middle" for one in plan.on_workers)
    assert (row["k"], row["ramp"], row["seeds"], row["diverged"]) == (cell.k, cell.ramp, 3, 1)
    assert (row["peak_ratio_mean"], row["emulated_peak_ratio_mean"]) == (2.0, 1.25)


# --- the page ---


def test_the_page_says_what_is_missing(tmp_path):
    page = write_page(tmp_path, docs=tmp_path / "docs").read_text()

    assert "Missing: adascale.json" in page
    assert "Missing: dynamic_sgd.json" in page


def test_verdicts_follow_from_the_rows():
    shared = {"task": "t", "higher_is_better": False, "metric_sd": 0.1, "diverged": 0}
    rows = [
        shared | {"rule": rule, "scale": scale, "metric_mean": mean}
        for rule, scale, mean in [
            ("adascale", 1, 1.0),
            ("adascale", 4, 0.5),
            ("adascale", 16, 1.3),
            ("lsw", 16, 1.4),
            ("adascale", "8-16-32", 9.0),
        ]
    ]

    (verdict,) = judge_scales(rows)

    assert (verdict.holds_at, verdict.fails_at) == ((4,), (16,))
    assert (verdict.largest, verdict.linear_worse) == (16, True)


def test_a_worse_metric_is_explained_by_training_loss_and_time_constants_of_momentum():
    shared = {"task": "t", "rule": "adascale", "metric": "accuracy", "higher_is_better": True}
    shared |= {"metric_sd": 0.01, "diverged": 0, "seeds": 3, "momentum": 0.99, "mean_gain": 1.0}
    rows = [
        shared | {"scale": s, "metric_mean": m, "train_loss_mean": loss, "steps_mean": steps}
        for s, m, loss, steps in [(1, 0.9, 0.3, 1000), (4, 0.8, 0.2, 500), (16, 0.8, 0.4, 200)]
    ]

    lines = adascale_section.reasons(rows)

    assert "S = 4: training loss 0.2, 0.3 at S = 1. Training comes as far" in lines[2]
    assert "2.0 time constants of momentum 0.99, 10.0 at S = 1" in lines[3]
    assert adascale_section.reasons(rows[:1]) == []


def test_what_was_tried_where_the_metric_is_worse_is_told_beside_its_own_base():
    shared = {"task": "t", "metric": "accuracy", "higher_is_better": True, "metric_sd": 0.01}
    shared |= {"diverged": 0, "seeds": 3, "momentum": 0.9, "train_loss_mean": 0.3}
    known = [
        *(("adascale", 1, 0.9), ("adascale", 64, 0.8)),
        *(("adascale, momentum 0.5", 1, 0.85), ("adascale, momentum 0.5", 64, 0.84)),
        ("adascale, no average", 64, 0.7),
    ]
    rows = [
        shared | {"rule": rule, "scale": scale, "metric_mean": metric, "steps_mean": 100}
        for rule, scale, metric in known
    ]

    lines = adascale_section.reasons(rows)

    assert lines[3] == (
        "- S = 64, tried: adascale, momentum 0.5: 0.84, and 0.85 ± 0.01 at S = 1 (adascale, "
        "momentum 0.5): within 2 sd of it, or better."
    )
    assert lines[4].endswith("0.7, and 0.9 ± 0.01 at S = 1 (adascale): worse, too.")


def test_what_measuring_seldom_does_is_told_beside_measuring_each_step():
    shared = {"task": "t", "higher_is_better": True, "metric_sd": 0.01, "mean_gain": 4.0}
    shared |= {"diverged": 0, "seeds": 3}
    rows = [
        shared | {"rule": rule, "scale": scale, "metric_mean": metric}
        for rule, scale, metric in [
            *(("adascale", 16, 0.9), ("adascale", 64, 0.9)),
            *((SELDOM, 16, 0.89), (SELDOM, 64, 0.8)),
        ]
    ]

    lines = adascale_section.seldom(rows)

    assert lines[4] == "| t | 16 | 0.9 ± 0.01 | 0.89 ± 0.01 | 4 | 4 | yes |"
    assert lines[5] == "| t | 64 | 0.9 ± 0.01 | 0.8 ± 0.01 | 4 | 4 | **no** |"
    assert adascale_section.seldom(rows[:2]) == []


@pytest.mark.parametrize("growth", [True, False])
def test_the_default_is_compared_with_the_jump_cell_by_cell(growth):
    rows = [
        {"task": "t", "k": k, "when": "late", "momentum": 0.9, "ramp": ramp, "is_default": default}
        for k in (16, 2, 0.5)
        for ramp, default in (("immediate", k < 1), ("T=8k", k > 1))
    ]

    pairs = default_against_jump(rows, growth=growth)

    expected = [(16, "T=8k", "immediate")] if growth else [(0.5, "immediate", "immediate")]
    assert [(row["k"], row["ramp"], jump["ramp"]) for row, jump in pairs] == expected


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_both_drivers_run_resume_and_make_the_page(tmp_path):
    runner, results = CliRunner(), tmp_path / "results"
    results.mkdir()

    def call(table, name, *more):
        path = results / f"{name}.json"
        options = ["--task", NAME, "--quick", "--seeds", "1", "--jobs", "1"]
        paths = ["--out", str(tmp_path / name), "--json", str(path)]
        done = runner.invoke(table.main, [*options, *paths, *more])
        assert done.exit_code == 0, done.output
        return json.loads(path.read_text()), (tmp_path / name / "ledger.jsonl").read_text()

    for table, name, keys, scales in (
        (adascale_table, "adascale", ADASCALE_KEYS, "1,4"),
        (dynamic_table, "dynamic_sgd", DYNAMIC_KEYS, "4"),
    ):
        result, ledger = call(table, name, "--scales", scales)
        assert call(table, name, "--scales", scales, "--resume") == (result, ledger)
        assert result["rows"]
        assert all(set(keys.split()) <= set(row) for row in result["rows"])
        assert result["finished_runs"] == result["planned_runs"]
        assert not result["failed_runs"]

    page = write_page(results, docs=tmp_path / "docs").read_text()

    assert "The quick form" in page
    pictures = [line.split("(_static/")[1].rstrip(")") for line in page.split("\n") if "![" in line]
    assert len(pictures) == 4
    assert all((tmp_path / "docs" / "_static" / name).stat().st_size > 1_000 for name in pictures)
