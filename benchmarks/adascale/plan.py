"""Which runs the AdaScale table is made of.

Knows tasks by name and the recipe's length; nothing of how a run is carried out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.adascale.rules import AS_MANY_STEPS, AT_ONCE, SELDOM, TRIED
from benchmarks.runs.ledger import Run
from benchmarks.runs.training import POINTS, Change
from benchmarks.tasks import load_task
from benchmarks.tasks.task import Recipe

__all__ = [
    "CHANGES",
    "SCALES",
    "TASKS",
    "TRIED_AT",
    "Cell",
    "Plan",
    "make_plan",
    "measure_names",
    "random_runs",
    "schedule_names",
]

TASKS = ("fashion", "mnist", "speech", "translation", "detection")
SCALES = (1, 4, 16, 64)
CHANGES: Mapping[str, tuple[Change, ...]] = {
    "8-16-32": ((0.0, 8), (0.25, 16), (0.5, 32)),
    "32-16-8": ((0.0, 32), (0.25, 16), (0.5, 8)),
}
# What was tried where AdaScale's metric does not stay what it is at S = 1.
TRIED_AT: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "translation": {"adascale, momentum 0.9": (1, 16, 64), "adascale, no average": (16,)},
    "mnist": {"adascale, no average": (16, 64)},
    "detection": {"adascale, momentum 0.5": (1, 64), "adascale, no average": (64,)},
}
SCHEDULES, SCHEDULES_TASK = 20, "mnist"
_SEEDS, _FEW_SEEDS, _QUICK_SEEDS, _SPREAD_SEEDS = 5, 3, 2, 10
_QUICK_SCALES = (1, 16)
_LARGE = 16
# Before anything is known of a gain: AdaScale takes this power of S more samples than linear.
_GUESSED_EXCESS = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row of the table: a task under a rule, at a scale or under changes of it."""

    task: str
    rule: str
    scale: int | str


@dataclass(slots=True, kw_only=True)
class Plan:
    """What is to be run, and which of it makes up which row.

    Attributes:
        runs: in the order in which they are to start.
        cells: names of the runs of each row.
    """

    runs: list[Run] = field(default_factory=list)
    cells: dict[Cell, list[str]] = field(default_factory=dict)


def make_plan(
    tasks: Sequence[str], *, scales: Sequence[int] | None, seeds: int | None, quick: bool
) -> Plan:
    """Return the plan of a table.

    Args:
        tasks: their names.
        scales: instead of the table's own.
        seeds: instead of 5; of the rules and changes that have 3, as many at most.
        quick: AdaScale and linear scaling with warm-up alone, on the quick form of the tasks.
    """
    plan = Plan()
    scales = scales or (_QUICK_SCALES if quick else SCALES)
    seeds = seeds or (_QUICK_SEEDS if quick else _SEEDS)
    few = min(seeds, 1 if quick else _FEW_SEEDS)
    for task in tasks:
        for cell, count in _cells(task, scales=scales, seeds=seeds, few=few, quick=quick):
            runs = [_train_run(cell, seed=seed, quick=quick) for seed in range(count)]
            known = {run.name for run in plan.runs}
            plan.runs += [run for run in runs if run.name not in known]
            plan.cells[cell] = [run.name for run in runs]
        plan.runs += [_measure_run(task, seed=seed, quick=quick) for seed in range(few)]
    plan.runs.sort(key=_order)
    return plan


def _cells(
    task: str, *, scales: Sequence[int], seeds: int, few: int, quick: bool
) -> Iterator[tuple[Cell, int]]:
    """Yield the rows of a task with their number of seeds."""
    for scale in scales:
        yield Cell(task=task, rule="adascale", scale=scale), seeds
        yield Cell(task=task, rule="lsw", scale=scale), seeds
    if quick:
        return
    for scale in scales:
        if scale >= _LARGE:
            for rule in (AS_MANY_STEPS, "sqrt", "identity"):
                yield Cell(task=task, rule=rule, scale=scale), few
    for change in CHANGES:
        for rule in ("adascale", AT_ONCE, "lsw"):
            yield Cell(task=task, rule=rule, scale=change), few
    for scale in scales:
        if scale >= _LARGE:
            yield Cell(task=task, rule=SELDOM, scale=scale), few
    for rule, tried_at in TRIED_AT.get(task, {}).items():
        for scale in sorted({*tried_at} & {*scales}):
            yield Cell(task=task, rule=rule, scale=scale), few


def _order(run: Run) -> tuple[bool, int]:
    """Return what runs are sorted by: the main claim first, and one seed after the other."""
    main = run.spec.get("rule") in ("adascale", "lsw") and len(run.spec["scales"]) == 1
    return not main, run.spec["seed"]


def _name(cell: Cell, *, seed: int) -> str:
    """Return a run's name."""
    rule = "base" if _is_base(cell) else cell.rule
    return f"{cell.task} {rule} {cell.scale} seed {seed}"


def _is_base(cell: Cell) -> bool:
    """Return whether it is the run that all rules are with a single base batch."""
    return cell.scale == 1 and cell.rule not in TRIED


def _train_run(cell: Cell, *, seed: int, quick: bool) -> Run:
    is_base = _is_base(cell)
    rule = "adascale" if is_base else cell.rule
    scales = CHANGES.get(str(cell.scale), ((0.0, cell.scale),))
    needs: tuple[str, ...] = ()
    if rule == AS_MANY_STEPS:
        needs = (_name(Cell(task=cell.task, rule="adascale", scale=cell.scale), seed=seed),)
    return Run(
        name=_name(cell, seed=seed),
        does="train_once",
        spec={
            "task": cell.task,
            "quick": quick,
            "seed": seed,
            "rule": rule,
            "scales": [list(change) for change in scales],
        },
        needs=needs,
        group=f"{cell.task} {'base' if is_base else cell.rule} {cell.scale}",
        base_steps=_recipe(cell.task, quick=quick).num_steps * _excess(cell.rule, scales=scales),
        evaluations=POINTS,
    )


def _excess(rule: str, *, scales: Sequence[Sequence[Any]]) -> float:
    if rule in ("lsw", "sqrt"):
        return 1.0
    return max(scale for _, scale in scales) ** _GUESSED_EXCESS


def _recipe(task: str, *, quick: bool) -> Recipe:
    found = load_task(task)
    return found.quick_recipe if quick else found.recipe


def measure_names(task: str, plan: Plan) -> list[str]:
    """Return the runs whose noise the gains of a task are predicted from."""
    return [r.name for r in plan.runs if r.does == "measure_gain" and r.spec["task"] == task]


def _measure_run(task: str, *, seed: int, quick: bool) -> Run:
    return Run(
        name=f"{task} noise seed {seed}",
        does="measure_gain",
        spec={"task": task, "quick": quick, "seed": seed},
        group=f"{task} noise",
        base_steps=_recipe(task, quick=quick).num_steps,
        evaluations=1,
    )


def random_runs(plan: Plan, *, quick: bool) -> list[Run]:
    """Return the runs on real workers that come and go, and what their spread is compared with.

    Empty where the plan lacks their task, or is the quick one.
    """
    if quick or not any(cell.task == SCHEDULES_TASK for cell in plan.cells):
        return []
    alone = Cell(task=SCHEDULES_TASK, rule="adascale", scale=1)
    base = [_train_run(alone, seed=seed, quick=quick) for seed in range(_SPREAD_SEEDS)]
    return base + [
        Run(
            name=name,
            does="train_on_workers",
            spec={"task": SCHEDULES_TASK, "quick": quick, "seed": seed},
            group=f"{SCHEDULES_TASK} real workers",
            base_steps=_recipe(SCHEDULES_TASK, quick=quick).num_steps,
            evaluations=1,
        )
        for seed, name in enumerate(schedule_names())
    ]


def schedule_names() -> list[str]:
    """Return the names of the runs on real workers."""
    return [f"{SCHEDULES_TASK} real workers {number}" for number in range(SCHEDULES)]
