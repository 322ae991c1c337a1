"""How long workers wait when others come, go, die or hang, and torchrun's restart beside it.

    python -m benchmarks.resize [--json PATH|-] [--sizes 1M,10M] [--changes N] [--resume FILE]

Each phase is a job of its own under `elastane run`, with 1 to 4 workers that train on the digits.
A pause is a survivor's longest gap between two finished steps around a change, without its median
step, of the survivor that waited longest. That of a hang is without the limit after which the job
gives a silent worker up; the limit runs from the worker's last sign of life, which may be a fifth
of a second before it was stopped. `undisturbed` is the same measure where nothing was done.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks.output import write_json
from benchmarks.resize.digits import write_digits
from benchmarks.resize.job import RunningJob, ending_on_sigterm
from benchmarks.resize.ledger import Ledger
from benchmarks.resize.measure import Change
from benchmarks.resize.phases import KINDS_OF, PHASES, run_phase
from benchmarks.resize.report import draw, summary
from benchmarks.resize.torchrun import measure_torchrun

_UNITS = {"": 1, "k": 1_000, "M": 1_000_000}
_HANG_LIMIT_S = 1.0
_USUAL_HANG_LIMIT_S = 60.0
_TORCHRUN_SIZE = "1M"
_MOST_STALLS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be measured.

    Attributes:
        sizes: names of the models' sizes.
        changes: of each kind, at least.
        most_workers: of a job.
        jobs: phases by job; all phases of a job share its workers.
        torchrun: whether its restart is measured, too.
        copies: whether newcomers copy the whole state, and none follows the others before.
    """

    sizes: tuple[str, ...]
    changes: int
    most_workers: int = 4
    jobs: tuple[tuple[str, ...], ...] = tuple((name,) for name in PHASES)
    torchrun: bool = True
    copies: bool = False


def number_of(size: str) -> int:
    """Return the number of parameters of a size's name, such as 10M or 20k."""
    found = re.fullmatch(r"(\d+)([kM]?)", size)
    if found is None:
        raise click.BadParameter(f"{size!r} is no size: write 10M or 20k")
    return int(found[1]) * _UNITS[found[2]]


def measure_all(plan: Plan, *, ledger: Ledger, console: Console) -> dict[str, Any]:
    """Measure whatever is not in the ledger, and return the result."""
    with tempfile.TemporaryDirectory(prefix="elastane-resize-") as name:
        folder = Path(name)
        digits = write_digits(folder / "digits.npz")
        for size in plan.sizes:
            for phases in plan.jobs:
                _run_jobs(size, phases, plan=plan, ledger=ledger, digits=digits, console=console)
        if plan.torchrun and ledger.other("torchrun") is None:
            console.print("torchrun: join and kill")
            parameters = number_of(_TORCHRUN_SIZE)
            found = measure_torchrun(folder / "torchrun", digits=digits, parameters=parameters)
            ledger.put("torchrun", found)
    parts = {size: [f"{size} {phase}" for job in plan.jobs for phase in job] for size in plan.sizes}
    return summary(
        {
            size: [c for name in names for c in ledger.changes(name)]
            for size, names in parts.items()
        },
        stalled={size: sum(map(ledger.stalled, names)) for size, names in parts.items()},
        torchrun=ledger.other("torchrun") if plan.torchrun else None,
    )


def _run_jobs(
    size: str,
    phases: tuple[str, ...],
    *,
    plan: Plan,
    ledger: Ledger,
    digits: Path,
    console: Console,
) -> None:
    """Measure phases in one job; after a change that never ends, go on in another one."""
    limit_s = _HANG_LIMIT_S if "hang" in phases else _USUAL_HANG_LIMIT_S
    for attempt in range(_MOST_STALLS + 1):
        missing = [p for p in phases if _missing(p, ledger.changes(f"{size} {p}"), plan=plan)]
        if not missing:
            return
        with RunningJob(
            digits.parent / f"{size}-{missing[0]}-{attempt}",
            digits=digits,
            parameters=number_of(size),
            most_workers=plan.most_workers,
            hang_limit_s=limit_s,
            follow_mb=math.inf if plan.copies else None,
        ) as job:
            _run_phases(size, missing, plan=plan, ledger=ledger, job=job, console=console)
    raise click.ClickException(f"{size}: more than {_MOST_STALLS} changes never came to their end")


def _run_phases(
    size: str, phases: list[str], *, plan: Plan, ledger: Ledger, job: RunningJob, console: Console
) -> None:
    """Measure phases in a job until all are done, or a change never ends."""
    for phase in phases:
        part = f"{size} {phase}"
        console.print(part)
        missing = _missing(phase, ledger.changes(part), plan=plan)
        changes, stall = run_phase(phase, job, changes=missing, most_workers=plan.most_workers)
        ledger.add(part, changes, stalled=stall is not None)
        if stall is not None:
            console.print(f"a change never came to its end: {stall}", markup=False)
            return


def _missing(phase: str, changes: list[Change], *, plan: Plan) -> int:
    """Return how many changes of a phase are still to be made."""
    made = Counter(change.kind for change in changes)
    return max(0, *(plan.changes - made[kind] for kind in KINDS_OF[phase]))


@click.command(help="Measure what changes of workers cost.")
@click.option("--json", "json_path", metavar="PATH|-", help="Write JSON here; - for stdout.")
@click.option("--sizes", default="1M,10M", show_default=True, help="Parameters of the models.")
@click.option("--changes", default=10, show_default=True, type=click.IntRange(1), help="A kind.")
@click.option("--workers", "most", default=4, show_default=True, type=click.IntRange(2))
@click.option(
    "--phase", "phases", multiple=True, type=click.Choice(list(PHASES)), help="Repeatable."
)
@click.option("--copies", is_flag=True, help="No newcomer follows the others: all copy.")
@click.option("--quick", is_flag=True, help="A tiny model and 2 changes a kind, for a look.")
@click.option("--no-torchrun", is_flag=True, help="Leave the restarts of torchrun out.")
@click.option(
    "--resume",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep what has been measured in this file, and go on from it.",
)
def main(
    json_path: str | None,
    sizes: str,
    changes: int,
    most: int,
    phases: tuple[str, ...],
    copies: bool,
    quick: bool,
    no_torchrun: bool,
    resume: Path | None,
) -> None:
    plan = Plan(
        sizes=tuple(sizes.split(",")),
        changes=changes,
        most_workers=most,
        jobs=tuple((name,) for name in phases or PHASES),
        torchrun=not no_torchrun,
        copies=copies,
    )
    if quick:
        jobs = (tuple(PHASES),)
        plan = replace(plan, sizes=("20k",), changes=2, most_workers=3, jobs=jobs, torchrun=False)
    for size in plan.sizes:
        number_of(size)
    console = Console(stderr=True)
    ledger = Ledger(resume, plan={"changes": changes, "quick": quick, "copies": copies})
    with ending_on_sigterm():
        result = measure_all(plan, ledger=ledger, console=console)
    console.print(draw(result))
    write_json(result, path=json_path)


if __name__ == "__main__":
    main()
