"""Which runs the study is made of.

Knows names of rules and scales; nothing of how a run is carried out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.adam.rules import FOUND, FOUND_LONGER, RULES
from benchmarks.runs.ledger import Run
from benchmarks.runs.training import POINTS, Change
from benchmarks.tasks import load_task

__all__ = ["CHANGES", "MOMENTS", "SCALES", "SPIKES", "TASK", "TRIED", "Cell", "Plan", "make_plan"]

TASK = "language"
SCALES = (4, 16)
CHANGES: Mapping[str, tuple[Change, ...]] = {
    "1-4-16": ((0.0, 1), (0.25, 4), (0.5, 16)),
    "16-4-1": ((0.0, 16), (0.25, 4), (0.5, 1)),
}
CHANGED = ("sqrt", "adamscale", "adascale, base squares")
TRIED: Mapping[int, Sequence[float]] = {
    1: (0.5, 1.0, 2.0),
    4: (2.0, 4.0, 8.0),
    16: (2.0, 4.0, 8.0),
}
"""Factors on the base learning rate that the search tries at each scale."""
_LONGER_TRIED = (1.0, 2.0, 4.0)
SPIKES: Mapping[str, tuple[Change, ...]] = {
    "1-16": ((0.0, 1), (0.5, 16)),
    "16-1": ((0.0, 16), (0.5, 1)),
}
MOMENTS = ("carried", "reset")
_SEEDS, _QUICK_SEEDS = 3, 1
_QUICK_RULES = ("unchanged", "sqrt", "adamscale")
_LONGER = 16
# Before anything is known of a gain: such rules take this power of S more samples.
_GUESSED_EXCESS = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row of the study.

    Attributes:
        rule: its name.
        scale: or the changes of it.
        lr_factor: on the base learning rate, where that is tried.
        moments: what became of them at the change, where that is looked at.
    """

    rule: str
    scale: int | str
    lr_factor: float | None = None
    moments: str | None = None


@dataclass(slots=True, kw_only=True)
class Plan:
    """What is to be run, and which of it makes up which row.

    Attributes:
        runs: in the order in which they are to start.
        cells: names of the runs of each row.
    """

    runs: list[Run] = field(default_factory=list)
    cells: dict[Cell, list[str]] = field(default_factory=dict)


def make_plan(*, seeds: int | None, quick: bool) -> Plan:
    """Return the plan of the study.

    Args:
        seeds: instead of 3.
        quick: one seed, few rules and the larger scale alone, on the quick form of the task.
    """
    plan = Plan()
    for cell in _cells(quick=quick):
        runs = [
            _run(cell, seed=seed, quick=quick)
            for seed in range(seeds or (_QUICK_SEEDS if quick else _SEEDS))
        ]
        plan.runs += runs
        plan.cells[cell] = [run.name for run in runs]
    plan.runs.sort(key=lambda run: run.spec["seed"])
    return plan


def _cells(*, quick: bool) -> Iterator[Cell]:
    rules = _QUICK_RULES if quick else RULES
    scales = SCALES[-1:] if quick else SCALES
    for factor in (1.0,) if quick else TRIED[1]:
        yield Cell(rule=FOUND, scale=1, lr_factor=factor)
    for scale in scales:
        for rule in rules:
            yield Cell(rule=rule, scale=scale)
        for factor in TRIED[scale]:
            yield Cell(rule=FOUND, scale=scale, lr_factor=factor)
    for changes in SPIKES:
        for moments in MOMENTS:
            yield Cell(rule="adamscale", scale=changes, moments=moments)
    if quick:
        return
    for factor in _LONGER_TRIED:
        yield Cell(rule=FOUND_LONGER, scale=_LONGER, lr_factor=factor)
    for changes in CHANGES:
        for rule in CHANGED:
            yield Cell(rule=rule, scale=changes)


def _name(cell: Cell, *, seed: int) -> str:
    more = "" if cell.lr_factor is None else f", lr x {cell.lr_factor:g}"
    if cell.moments is not None:
        more = f", moments {cell.moments}"
    return f"{TASK} {cell.rule} {cell.scale}{more}, seed {seed}"


def _run(cell: Cell, *, seed: int, quick: bool) -> Run:
    changes = {**CHANGES, **SPIKES}.get(str(cell.scale), ((0.0, cell.scale),))
    spec: dict[str, Any] = {
        "task": TASK,
        "quick": quick,
        "seed": seed,
        "rule": cell.rule,
        "scales": [list(change) for change in changes],
        "lr_factor": cell.lr_factor or 1.0,
        "moments": cell.moments,
    }
    needs = ()
    if cell.rule == FOUND_LONGER:
        needs = (_name(Cell(rule="adamscale", scale=cell.scale), seed=seed),)
    task = load_task(TASK)
    recipe = task.quick_recipe if quick else task.recipe
    measures = cell.rule in RULES and RULES[cell.rule].measure
    largest = max(scale for _, scale in spec["scales"])
    return Run(
        name=_name(cell, seed=seed),
        does="train_once" if cell.moments is None else "change_once",
        spec=spec,
        needs=needs,
        group=f"{cell.rule} {cell.scale} {cell.moments}",
        base_steps=recipe.num_steps * (largest**_GUESSED_EXCESS if measures else 1.0),
        evaluations=POINTS,
    )
