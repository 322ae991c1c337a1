"""What the tables' commands have in common: options, the prediction of costs, runs, the result.

Knows plans and ledgers; nothing of what is compared.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks.output import versions
from benchmarks.runs.calibration import calibration_run, predicted_s
from benchmarks.runs.ledger import Entry, Ledger, Run
from benchmarks.runs.pool import carry_out, workers
from benchmarks.tasks import load_task

__all__ = [
    "Request",
    "available",
    "facts",
    "open_ledger",
    "run_plan",
    "shared_options",
    "whole_numbers",
]

_ROOT = Path(__file__).parents[2]
_PROGRAM = ("src", "benchmarks", ":!benchmarks/results")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for on the command line.

    Attributes:
        tasks: their names.
        seeds: number of seeds.
        quick: whether the quick form of the tasks is asked for, and the main claim alone.
        resume: go on with the ledger that is there.
        out: folder of the ledger.
        jobs: runs side by side.
        budget_h: processor hours of the ledger after which nothing starts; `None` for no limit.
    """

    tasks: tuple[str, ...]
    seeds: int | None
    quick: bool
    resume: bool
    out: Path
    jobs: int
    budget_h: float | None


def shared_options(name: str, *, tasks: Sequence[str]) -> Callable[[Any], Any]:
    """Return a decorator that gives a command the options of `Request`, and `json_path`."""
    listed = ", ".join(tasks)
    file, path = click.Path(path_type=Path), f"benchmarks/out/{name}"
    made = [
        click.option("--task", "tasks", multiple=True, help=f"Repeatable; else {listed}."),
        click.option("--seeds", type=click.IntRange(1), help="Fewer or more than the full table."),
        click.option("--quick", is_flag=True, help="Each task's main claim, in small."),
        click.option("--resume", is_flag=True, help="Go on with the runs in the folder."),
        click.option("--out", type=file, help=f"Folder of the runs; else {path}[-quick]."),
        click.option("--json", "json_path", metavar="PATH|-", help="Write JSON; - for stdout."),
        click.option("--jobs", default=2, show_default=True, type=click.IntRange(1)),
        click.option("--budget", "budget_h", metavar="HOURS", type=float, help="Stop after these."),
    ]

    def decorate(command: Any) -> Any:
        for option in reversed(made):
            command = option(command)
        return command

    return decorate


def whole_numbers(*, at_least: int) -> Callable[..., tuple[int, ...] | None]:
    """Return what reads an option's list of numbers with commas, and puts them in order."""

    def read(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        try:
            found = tuple(sorted({int(one) for one in value.split(",")}))
        except ValueError:
            raise click.BadParameter("write whole numbers with commas, such as 4,16") from None
        if found[0] < at_least:
            raise click.BadParameter(f"{at_least} is the least")
        return found

    return read


def available(names: Sequence[str], *, console: Console) -> tuple[list[str], dict[str, str]]:
    """Return the tasks that can be run here, and what the others miss.

    Raises:
        UsageError: there is no task of that name.
    """
    missing: dict[str, str] = {}
    for name in names:
        try:
            lacks = load_task(name).missing()
        except click.UsageError:
            raise
        except click.ClickException as error:
            lacks = error.message
        if lacks is not None:
            missing[name] = lacks
            console.print(f"{name} is left out: {lacks}", style="yellow", markup=False)
    return [name for name in names if name not in missing], missing


def open_ledger(request: Request, *, benchmark: str) -> Ledger:
    """Return the ledger, a new one or the one that is there.

    Raises:
        ClickException: there is one and it was not asked for, or it is of another kind.
    """
    settings = {"benchmark": benchmark, "quick": request.quick}
    return Ledger(folder=request.out, settings=settings, resume=request.resume)


def run_plan(
    runs: Sequence[Run],
    *,
    request: Request,
    ledger: Ledger,
    module: str,
    console: Console,
) -> None:
    """Say what a plan will cost, and carry it out as far as the budget goes."""
    tasks = dict.fromkeys(run.spec["task"] for run in runs)

    def may_start() -> bool:
        return request.budget_h is None or ledger.process_s < request.budget_h * 3600

    with workers(module, count=request.jobs, folder=ledger.folder) as by:
        carry = partial(carry_out, ledger=ledger, by=by, commit=_commit(), may_start=may_start)
        console.print("calibrating ...")
        carry([calibration_run(task, quick=request.quick) for task in tasks])
        left = _announce(runs, ledger=ledger, console=console)
        ended = count(1)

        def tell(entry: Entry) -> None:
            what = entry.failure or f"{entry.process_s:.1f} s"
            console.print(f"[{next(ended)}/{len(left)}] {entry.name}: {what}", markup=False)

        carry(left, tell=tell)
    if not may_start():
        console.print(f"the budget of {request.budget_h:g} core-hours is spent: --resume goes on")


def _announce(runs: Sequence[Run], *, ledger: Ledger, console: Console) -> list[Run]:
    """Say what the runs will cost that are not in the ledger, and return them."""
    left = [run for run in runs if ledger.record(run.name) is None]
    seconds = predicted_s(left, ledger=ledger)
    for task, task_s in seconds.items():
        console.print(f"{task}: about {task_s / 3600:.2f} core-hours to go", markup=False)
    console.print(
        f"{len(left)} of {len(runs)} runs to go, about {sum(seconds.values()) / 3600:.2f} "
        f"core-hours; {ledger.process_s / 3600:.2f} spent so far",
        markup=False,
    )
    return left


def facts(ledger: Ledger, runs: Sequence[Run], *, missing: Mapping[str, str]) -> dict[str, Any]:
    """Return what a result says of how it came about."""
    names = {run.name for run in runs}
    failed = {name: why for name in sorted(names) if (why := ledger.failure(name)) is not None}
    return {
        "quick": ledger.settings["quick"],
        "planned_runs": len(names),
        "finished_runs": len(ledger.records(names)),
        "failed_runs": failed,
        "missing_tasks": dict(missing),
        "core_hours": round(ledger.process_s / 3600, 3),
        "commits": sorted({entry.commit for entry in ledger.entries if entry.commit}),
        "versions": versions(),
    }


def _commit() -> str:
    """Return the program's commit, `+` if something in it was changed since; empty without git."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return commit + "+" * bool(_git("status", "--porcelain", "--", *_PROGRAM))
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=_ROOT, capture_output=True, check=True, text=True)
    return done.stdout.strip()
