"""What `elastane run` costs while nothing changes: the same session under it and under torchrun.

    python -m benchmarks.steady [--json PATH|-] [--pairs N] [--steps N]

Processor time (user and system) of two workers a step, from step 50 on, so that start-up is left
out. The runs of a pair follow each other; each pair has a second run under torchrun, whose ratio
to the first says how much of a difference is noise.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.output import versions, write_json
from benchmarks.resize.digits import write_digits
from benchmarks.resize.job import ROOT, WORKER, Tail, ending_on_sigterm, worker_environment
from benchmarks.resize.measure import Line, steps_of

GOAL = 1.03
NUM_WORKERS = 2
FIRST_STEP = 50
BLOCK_STEPS = 25
_LIMIT_S = 240.0
_LAUNCHERS = ("elastane", "torchrun", "torchrun again")


def cpu_ms_per_step(lines: Sequence[Line], *, first: int, last: int) -> float:
    """Return the processor time that all workers together took for a step, between two steps.

    It is the median over blocks of steps: what else runs on the machine slows some of them down.

    Raises:
        ValueError: not all of the workers made all of the steps.
    """
    used: dict[int, list[float]] = defaultdict(list)
    for line in steps_of(lines):
        used[line.step].append(line.cpu)
    ends = range(first, last + 1, BLOCK_STEPS)
    if any(len(used[end]) != NUM_WORKERS for end in ends):
        raise ValueError(f"steps {first} to {last} were not all made by {NUM_WORKERS} workers")
    blocks = [sum(used[b]) - sum(used[a]) for a, b in pairwise(ends)]
    return 1e3 * statistics.median(blocks) / BLOCK_STEPS


def run_once(
    launcher: str, *, folder: Path, digits: Path, parameters: int, num_steps: int
) -> float:
    """Train under a launcher; return the processor time of a step in ms."""
    records, run_dir = folder / "records", folder / "run"
    records.mkdir(parents=True)
    if launcher == "elastane":
        start = ["elastane", "run", "--workers", str(NUM_WORKERS), "--run-dir", str(run_dir)]
    else:
        start = ["torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_WORKERS}"]
    command = [
        *(sys.executable, "-m", *start, "-m", WORKER, "--digits", str(digits)),
        *("--records", str(records), "--parameters", str(parameters)),
        *("--steps", str(num_steps), "--run-dir", str(run_dir)),
    ]
    _run(command, log=folder / "log")
    lines = [Line(**one) for path in records.glob("*.jsonl") for one in Tail(path).new()]
    return cpu_ms_per_step(lines, first=FIRST_STEP, last=num_steps)


def _run(command: Sequence[str], *, log: Path) -> None:
    """Run a launcher to its end; one that takes too long is asked to end its workers first."""
    with log.open("wb") as file:
        launcher = subprocess.Popen(
            command, cwd=ROOT, env=worker_environment(), stdout=file, stderr=file
        )
    try:
        code = launcher.wait(_LIMIT_S)
    finally:
        launcher.terminate()
        launcher.wait(_LIMIT_S)
    if code:
        raise click.ClickException(f"{command[2]} failed:\n{log.read_text()[-4000:]}")


def measure(pairs: int, *, parameters: int, num_steps: int, console: Console) -> dict[str, Any]:
    """Return the times of all runs by launcher, and the ratios of each pair."""
    times: dict[str, list[float]] = {name: [] for name in _LAUNCHERS}
    with tempfile.TemporaryDirectory(prefix="elastane-steady-") as name:
        folder = Path(name)
        digits = write_digits(folder / "digits.npz")
        for pair in range(pairs):
            shift = pair % len(_LAUNCHERS)
            for launcher in (*_LAUNCHERS[shift:], *_LAUNCHERS[:shift]):
                cpu_ms = run_once(
                    launcher,
                    folder=folder / f"{pair} {launcher}",
                    digits=digits,
                    parameters=parameters,
                    num_steps=num_steps,
                )
                console.print(f"pair {pair + 1}: {launcher} {cpu_ms:.2f} ms a step")
                times[launcher].append(cpu_ms)
    return summary(times)


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians and ratios; the goal is for the first ratio alone."""
    rows = [_row(f"{name} / torchrun", times[name], times["torchrun"]) for name in _LAUNCHERS]
    ratio, _, noise = rows
    return {
        "cpu_ms_per_step": {n: round(statistics.median(ms), 3) for n, ms in times.items()},
        "rows": [ratio, noise],
        "goals": [
            {
                "goal": "elastane / torchrun median",
                "limit": GOAL,
                "value": ratio["median"],
                "met": ratio["median"] <= GOAL,
            }
        ],
    }


def _row(name: str, values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(values, base, strict=True)]
    q1, median, q3 = ratios[0], ratios[0], ratios[0]
    if len(ratios) > 1:
        q1, median, q3 = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "ratio": name,
        "n": len(ratios),
        "median": round(median, 4),
        "q1": round(q1, 4),
        "q3": round(q3, 4),
    }


def draw(result: dict[str, Any]) -> Table:
    """Return the result as a table."""
    table = Table(title=f"Processor time of a step, {NUM_WORKERS} workers, goal {GOAL:g}")
    table.add_column("ratio")
    for name in ("n", "median", "q1-q3"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        spread = f"{row['q1']:.3f}-{row['q3']:.3f}"
        table.add_row(row["ratio"], str(row["n"]), f"{row['median']:.3f}", spread)
    return table


@click.command(help="Compare a step under elastane run with one under torchrun.")
@click.option("--json", "json_path", metavar="PATH|-", help="Write JSON here; - for stdout.")
@click.option("--pairs", default=6, show_default=True, type=click.IntRange(1))
@click.option(
    "--steps", default=350, show_default=True, type=click.IntRange(FIRST_STEP + BLOCK_STEPS)
)
@click.option("--parameters", default=1_000_000, show_default=True, type=click.IntRange(1))
def main(json_path: str | None, pairs: int, steps: int, parameters: int) -> None:
    console = Console(stderr=True)
    with ending_on_sigterm():
        result = measure(pairs, parameters=parameters, num_steps=steps, console=console)
    result = {
        "benchmark": "steady",
        "num_workers": NUM_WORKERS,
        "parameters": parameters,
        "steps": [FIRST_STEP, steps],
        **result,
        "versions": versions(),
    }
    console.print(draw(result))
    write_json(result, path=json_path)


if __name__ == "__main__":
    main()
