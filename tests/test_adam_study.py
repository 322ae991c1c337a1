"""The study of AdamW in larger batches: its task, its plan, its runs, and the page made of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.adam import runs
from benchmarks.adam.plan import CHANGED, MOMENTS, SPIKES, TRIED, Plan, make_plan
from benchmarks.adam.rows import best_rows, make_rows, spikes
from benchmarks.adam.rules import FOUND, FOUND_LONGER, RULES
from benchmarks.optimizers_page.__main__ import page, study_parts
from benchmarks.optimizers_page.picture import draw_study
from benchmarks.runs.ledger import Entry, Ledger
from benchmarks.runs.subject import subject_of
from benchmarks.tasks import language, load_task

TASK = load_task("language")
needs_text = pytest.mark.skipif(TASK.missing() is not None, reason=str(TASK.missing()))


# The task ---------------------------------------------------------------------------------------


@needs_text
def test_no_passage_is_on_both_sides_and_all_letters_have_numbers():
    data: Any = language.load(False)
    (train,), (held_out,) = data.train.tensors, data.validation.tensors
    assert train.shape[1] == held_out.shape[1] == language.CONTEXT + 1
    assert len(held_out) == 1_000
    assert len(set(language.read_text())) == language.NUM_LETTERS == int(train.max()) + 1
    seen = {tuple(row) for row in train.tolist()}
    assert sum(tuple(row) in seen for row in held_out.tolist()) == 0


def test_the_model_does_not_see_the_letter_that_it_has_to_give():
    torch.manual_seed(0)
    model = TASK.build().eval()
    letters = torch.randint(language.NUM_LETTERS, (2, language.CONTEXT))
    other = letters.clone()
    other[:, 40:] = (other[:, 40:] + 1) % language.NUM_LETTERS
    before, after = model(letters), model(other)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_an_untrained_models_loss_is_about_that_of_guessing():
    torch.manual_seed(0)
    batch = [torch.randint(language.NUM_LETTERS, (4, language.CONTEXT + 1))]
    loss = TASK.loss(TASK.build(), batch).item()
    assert loss == pytest.approx(math.log(language.NUM_LETTERS), rel=0.15)


# The plan ---------------------------------------------------------------------------------------


def test_each_rule_each_search_and_each_change_has_a_row_for_each_seed():
    plan = make_plan(seeds=None, quick=False)
    names = [run.name for run in plan.runs]
    assert len(set(names)) == len(names)
    assert all(len(found) == 3 for found in plan.cells.values())
    still = {(cell.rule, cell.scale) for cell in plan.cells if cell.lr_factor is None}
    assert {(rule, scale) for rule in RULES for scale in (4, 16)} <= still
    assert {(rule, change) for rule in CHANGED for change in ("1-4-16", "16-4-1")} <= still
    tried = {(cell.scale, cell.lr_factor) for cell in plan.cells if cell.rule == FOUND}
    assert tried == {(scale, factor) for scale, each in TRIED.items() for factor in each}
    looked_at = {(cell.scale, cell.moments) for cell in plan.cells if cell.moments}
    assert looked_at == {(change, moments) for change in SPIKES for moments in MOMENTS}


def test_a_search_with_as_many_steps_needs_the_run_that_tells_them():
    plan = make_plan(seeds=2, quick=False)
    longer = [run for run in plan.runs if run.spec["rule"] == FOUND_LONGER]
    names = {run.name for run in plan.runs}
    assert longer
    for run in longer:
        (needed,) = run.needs
        assert needed in names
        assert needed == f"language adamscale 16, seed {run.spec['seed']}"


def test_the_quick_plan_takes_minutes():
    assert len(make_plan(seeds=None, quick=True).runs) <= 12


# Runs -------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch):
    """The quick task, shortened to 24 base steps and a few passages to evaluate on."""
    subject = subject_of("language", quick=True)
    (held_out,) = subject.data.validation.tensors
    data = replace(subject.data, validation=type(subject.data.validation)(held_out[:40]))
    subject = replace(subject, recipe=replace(subject.recipe, num_steps=24), data=data)
    monkeypatch.setattr(runs, "subject_of", lambda *_, **__: subject)


def spec(rule, **more):
    known = {"task": "language", "quick": True, "seed": 0, "scales": [[0.0, 4]], "moments": None}
    return known | {"rule": rule, **more}


@needs_text
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_trains(rule):
    record = runs.train_once(spec(rule), {})
    assert record["metric"] < math.log2(language.NUM_LETTERS)
    assert record["steps"] <= 24
    if not RULES[rule].measure:
        assert record["steps"] == 6


@needs_text
@pytest.mark.usefixtures("short")
def test_a_search_takes_the_steps_it_is_told_and_the_rate_that_it_tries():
    record = runs.train_once(spec(FOUND, lr_factor=2.0), {})
    assert record["steps"] == 6
    longer = runs.train_once(spec(FOUND_LONGER), {"adamscale": {"metric": 3.0, "steps": 9}})
    assert longer["steps"] == 9
    plain = runs.train_once(spec(FOUND, lr_factor=1.0), {})
    assert max(record["trace"]["lr"]) == pytest.approx(2 * max(plain["trace"]["lr"]), rel=1e-4)
    with pytest.raises(ValueError, match="broke off"):
        runs.train_once(spec(FOUND_LONGER), {"adamscale": {"metric": None, "steps": 3}})


@needs_text
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("moments", MOMENTS)
def test_the_losses_around_a_change_are_taken_down(moments, monkeypatch):
    monkeypatch.setattr(runs, "AFTER", 6)
    changes = [[0.0, 1], [0.25, 4]]
    record = runs.change_once(spec("adamscale", scales=changes, moments=moments), {})
    assert (len(record["before"]), len(record["after"])) == (5, 6)
    assert not record["diverged"]
    assert 0.5 < record["peak_ratio"] < 2


# Rows and page ----------------------------------------------------------------------------------


def ledger_of(folder, plan: Plan, **metrics: float) -> Ledger:
    """Return a ledger in which each run has a metric by its rule, and its factor on top."""
    ledger = Ledger(folder=folder, settings={"quick": False})
    for run in plan.runs:
        rule, factor = run.spec["rule"], run.spec["lr_factor"]
        record: dict[str, Any] = {
            "metric": metrics.get(rule, 2.5) + 0.1 * abs(factor - 2),
            "steps": 150,
            "num_steps": 2_400,
            "diverged": rule == FOUND and factor == 8.0,
            "peak_ratio": 1.05 if run.spec["moments"] == "carried" else 1.4,
            "before": [2.0],
            "after": [2.1],
        }
        ledger.add(Entry(name=run.name, group=run.group, record=record))
    return ledger


def result_of(folder) -> dict[str, Any]:
    plan = make_plan(seeds=2, quick=False)
    ledger = ledger_of(folder, plan, **{FOUND: 2.2, "sqrt": 2.4})
    rows = make_rows(plan, ledger=ledger)
    return {
        "rows": rows,
        "best": best_rows(rows),
        "spikes": spikes(plan, ledger=ledger),
        "quick": False,
        "planned_runs": len(plan.runs),
        "finished_runs": len(plan.runs),
        "failed_runs": {},
        "missing_tasks": {},
        "core_hours": 1.0,
        "commits": ["abc"],
        "versions": {"elastane": "1", "torch": "2", "python": "3", "machine": "m"},
    }


def test_the_best_of_a_search_is_the_lowest_mean_of_those_where_no_seed_diverged(tmp_path):
    result = result_of(tmp_path)
    best = {(row["rule"], row["scale"]): row["lr_factor"] for row in result["best"]}
    assert best == {(FOUND, 1): 2.0, (FOUND, 4): 2.0, (FOUND, 16): 2.0, (FOUND_LONGER, 16): 2.0}
    row = next(r for r in result["rows"] if (r["rule"], r["lr_factor"]) == (FOUND, 8.0))
    assert (row["diverged"], row["metric_mean"]) == (2, None)


def test_the_page_shows_rules_beside_what_the_search_found(tmp_path):
    result = result_of(tmp_path / "ledger")
    (tmp_path / "adam.json").write_text(json.dumps(result))
    text = page(tmp_path)
    assert "| base batch | 1 | 2.3 ± 0 | +0.000 |" in text
    assert "| sqrt | 16 | 2.5 ± 0 | +0.200 | 150 | 16 | 0 of 2 |" in text
    assert "| *found by search: lr x 2* | 16 | 2.2 ± 0 | -0.100 |" in text
    assert "| 1-16 | carried | 1.05 | 1.05 | 0 of 2 |" in text
    assert "| 16-1 | reset | 1.4 | 1.4 | 0 of 2 |" in text
    assert "Not measured yet: `python -m benchmarks.optimizers " in text


def test_the_page_shows_the_contract(tmp_path):
    row = {"loss_after": 0.5, "peak_ratio": 1.01, "peak_ratio_reset": 1.5, "resumes": True}
    rows = [
        row | {"optimizer": "Adam", "rule": "sqrt", "converges": True},
        row | {"optimizer": "Adam", "rule": "adamscale", "converges": False},
    ]
    result = {"rows": rows, "missing": {"LAMB": "is not here"}}
    (tmp_path / "optimizers.json").write_text(json.dumps(result))
    text = page(tmp_path)
    assert "| Adam | 0.50 | 0.50 (not converged) | 1.01 | 1.50 |" in text
    assert "1 of 2 runs came below half" in text
    assert "**Missing: LAMB.** is not here" in text


def test_the_picture_is_drawn(tmp_path):
    base, best, longer, rules = study_parts(result_of(tmp_path / "ledger"))
    still = [row for row in rules if isinstance(row["scale"], int)]
    path = tmp_path / "adam.png"
    draw_study(still, base=base, found=best, longer=longer, scales=[4, 16], path=path)
    assert path.stat().st_size > 5_000
