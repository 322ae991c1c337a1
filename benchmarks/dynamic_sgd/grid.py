"""Which runs the Dynamic SGD tables are made of.

Knows tasks by name and the recipe's length; nothing of how a run is carried out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.dynamic_sgd.ramps import (
    GROWTH_ONLY,
    IMMEDIATE,
    KEPT_RAMP,
    RAMPS,
    RATIO_RAMP,
    default_ramp,
)
from benchmarks.dynamic_sgd.state import HELD_OUT_SAMPLES
from benchmarks.runs.ledger import Run
from benchmarks.tasks import load_task
from benchmarks.tasks.task import Recipe

__all__ = ["FULL_TASK", "TASKS", "WHEN", "WORKERS", "Cell", "Grid", "Plan", "grid_of", "make_plan"]

FULL_TASK = "mnist"
TASKS = (FULL_TASK, "detection", "segmentation")
WORKERS = 4
WHEN: Mapping[str, float] = {"early": 0.2, "middle": 0.5, "late": 0.8}
# A forward pass costs about a third of a step with as many samples.
_GUESSED_LOOK_SAMPLES = HELD_OUT_SAMPLES / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is compared on a task.

    Attributes:
        ratios: of batches, upwards; each is made downwards, too, if `shrinks`.
        shrinks: whether batches also get smaller.
        when: names of the moments of change.
        momenta: of SGD.
        ramps: their names.
        seeds: number of them.
        horizon: steps that are looked at after a change.
        finishes: whether the final metric is measured, too.
        noise: whether the variance of updates is measured.
        workers: whether changes by `WORKERS` are made on real workers, too.
    """

    ratios: tuple[int, ...] = (4, 16)
    shrinks: bool = True
    when: tuple[str, ...] = ("middle",)
    momenta: tuple[float, ...] = (0.9,)
    ramps: tuple[str, ...] = (IMMEDIATE, "T=8", RATIO_RAMP, "noise-matched", KEPT_RAMP)
    seeds: int = 3
    horizon: int = 200
    finishes: bool = True
    noise: bool = False
    workers: bool = False


def grid_of(task: str, *, quick: bool) -> Grid:
    """Return the grid of a task: the full one for one task, a part of it for the others."""
    if quick:
        ramps = (IMMEDIATE, RATIO_RAMP, KEPT_RAMP)
        return Grid(ratios=(16,), shrinks=False, ramps=ramps, seeds=2, horizon=140, finishes=False)
    if task != FULL_TASK:
        return Grid()
    return Grid(
        ratios=(2, 4, 16),
        when=tuple(WHEN),
        momenta=(0.9, 0.99),
        ramps=tuple(RAMPS),
        noise=True,
        workers=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row of the tables; `k` is the new batch over the old."""

    task: str
    k: float
    when: str
    momentum: float
    ramp: str


@dataclass(slots=True, kw_only=True)
class Plan:
    """What is to be run, and which of it makes up which row.

    Attributes:
        runs: in the order in which they are to start.
        worker_runs: those on real workers, which want the machine to themselves.
        branches: names of the runs of each row that are looked at after the change,
        finishes: that go to the run's end,
        noises: that measure the updates' variance,
        on_workers: and that are made on real workers.
    """

    runs: list[Run] = field(default_factory=list)
    worker_runs: list[Run] = field(default_factory=list)
    branches: dict[Cell, list[str]] = field(default_factory=dict)
    finishes: dict[Cell, list[str]] = field(default_factory=dict)
    noises: dict[Cell, list[str]] = field(default_factory=dict)
    on_workers: dict[Cell, list[str]] = field(default_factory=dict)


def make_plan(
    tasks: Sequence[str],
    *,
    folder: Path,
    ratios: Sequence[int] | None,
    seeds: int | None,
    quick: bool,
) -> Plan:
    """Return the plan of the tables.

    Args:
        tasks: their names.
        folder: of the ledger, where the states before the changes are kept, too.
        ratios: instead of the grid's own.
        seeds: instead of the grid's own.
        quick: growth by 16 in the middle of each task's run, at once, by equation 6 and by default.
    """
    plan = Plan()
    for task in tasks:
        grid = grid_of(task, quick=quick)
        grid = replace(grid, ratios=tuple(ratios or grid.ratios), seeds=seeds or grid.seeds)
        maker = _Maker(task, grid=grid, folder=folder, quick=quick, plan=plan)
        for seed in range(grid.seeds):
            maker.add(seed)
    plan.runs.sort(key=lambda run: run.spec["seed"])
    return plan


class _Maker:
    """Adds a task's runs to a plan."""

    def __init__(self, task: str, *, grid: Grid, folder: Path, quick: bool, plan: Plan) -> None:
        self._task, self._grid, self._folder = task, grid, folder
        self._quick, self._plan = quick, plan
        found = load_task(task)
        self._recipe: Recipe = found.quick_recipe if quick else found.recipe

    def add(self, seed: int) -> None:
        """Add the runs of a seed."""
        starts: dict[tuple[int, float], Run] = {}
        for cell, before, after in self._cells():
            key = (before, cell.momentum)
            if key not in starts:
                starts[key] = self._start(before, momentum=cell.momentum, seed=seed)
                self._plan.runs.append(starts[key])
            spec = self._spec(seed) | {
                "before": before,
                "after": after,
                "when": cell.when,
                "momentum": cell.momentum,
                "ramp": cell.ramp,
                "horizon": self._grid.horizon,
            }
            self._add_after(starts[key], cell, spec=spec, seed=seed)

    def _cells(self) -> Iterator[tuple[Cell, int, int]]:
        """Yield the rows with the scales before and after."""
        grid = self._grid
        changes = [(1, ratio) for ratio in grid.ratios]
        if grid.shrinks:
            changes += [(ratio, 1) for ratio in grid.ratios]
        for before, after in changes:
            for momentum in grid.momenta:
                for when in grid.when:
                    for ramp in grid.ramps:
                        if ramp in GROWTH_ONLY and after < before:
                            continue
                        yield (
                            Cell(
                                task=self._task,
                                k=after / before,
                                when=when,
                                momentum=momentum,
                                ramp=ramp,
                            ),
                            before,
                            after,
                        )

    def _add_after(self, start: Run, cell: Cell, *, spec: dict[str, Any], seed: int) -> None:
        grid, plan, length = self._grid, self._plan, self._recipe.num_steps
        what = f"{cell.task} k={cell.k:g} {cell.when} momentum {cell.momentum} {cell.ramp}"
        scale = spec["after"]

        def add(kind: str, names: dict[Cell, list[str]], *, base_steps: float, **more: Any) -> None:
            run = Run(
                name=f"{what} {kind} seed {seed}",
                does=kind,
                spec=spec | more,
                needs=(start.name,),
                group=f"{cell.task} k={cell.k:g} {cell.when} {kind}",
                base_steps=base_steps,
            )
            (plan.worker_runs if kind == "change_on_workers" else plan.runs).append(run)
            names.setdefault(cell, []).append(run.name)

        look = _GUESSED_LOOK_SAMPLES / self._recipe.base_batch_size
        add("branch", plan.branches, base_steps=grid.horizon * (scale + look))
        ends = {default_ramp(cell.k, momentum=cell.momentum), IMMEDIATE, RATIO_RAMP, KEPT_RAMP}
        if grid.finishes and cell.ramp in ends:
            add("finish", plan.finishes, base_steps=(1 - WHEN[cell.when]) * length)
        if grid.noise and seed == 0 and _is_measured(cell):
            cost = _REPLICAS * (_SETTLE * spec["before"] + _NOISE_HORIZON * scale)
            more = {"replicas": _REPLICAS, "settle": _SETTLE, "horizon": _NOISE_HORIZON}
            add("measure_noise", plan.noises, base_steps=cost, **more)
        if grid.workers and seed < _WORKER_SEEDS and _is_made_on_workers(cell):
            add("change_on_workers", plan.on_workers, base_steps=grid.horizon * (2 * scale + look))

    def _start(self, scale: int, *, momentum: float, seed: int) -> Run:
        name = f"{self._task} scale {scale} momentum {momentum} start seed {seed}"
        points = {when: WHEN[when] for when in self._grid.when}
        spec = self._spec(seed) | {
            "name": name,
            "scale": scale,
            "momentum": momentum,
            "points": points,
        }
        cost = max(points.values()) * self._recipe.num_steps
        group = f"{self._task} scale {scale} start"
        return Run(name=name, does="start", spec=spec, group=group, base_steps=cost)

    def _spec(self, seed: int) -> dict[str, Any]:
        return {
            "task": self._task,
            "quick": self._quick,
            "seed": seed,
            "folder": str(self._folder),
        }


_REPLICAS, _SETTLE, _NOISE_HORIZON = 16, 40, 40


_WORKER_SEEDS = 3


def _is_measured(cell: Cell) -> bool:
    """Return whether the updates' variance is measured, too: where the noise model has a table."""
    fits = _is_usual(cell) and max(cell.k, 1 / cell.k) > 2
    return fits and cell.ramp not in ("unchanged", "T=1/(1-m)")


def _is_made_on_workers(cell: Cell) -> bool:
    """Return whether a change is made on real workers, too.

    The buffer can't be divided there: nobody is told before the first step with others.
    """
    fits = _is_usual(cell) and max(cell.k, 1 / cell.k) == WORKERS
    return fits and not RAMPS[cell.ramp].divides_buffer


def _is_usual(cell: Cell) -> bool:
    return cell.when == "middle" and cell.momentum == 0.9
