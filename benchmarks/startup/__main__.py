"""How long commands and jobs take to start, beside those of torch.

    python -m benchmarks.startup [--json PATH|-] [--quick] [--rounds N]

Commands run to their end. Of a job it is the time from the start of its launcher until each worker
has ended its first step: the same model under `elastane run` by a session, and under torchrun by
hand and by a session. All of them follow each other in each round; one stands there twice.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.output import versions, write_json
from benchmarks.resize.job import ROOT, ending_on_sigterm, worker_environment

__all__ = ["commands", "first_steps", "main"]

_LIMIT_S = 120.0
_SCRIPT = "benchmarks.startup.first_step"
WORKERS = (1, 2)


def commands() -> Mapping[str, Sequence[str]]:
    """Return the arguments of the commands, for this Python."""
    return {
        "python -c pass": ("-c", "pass"),
        "import torch": ("-c", "import torch"),
        "import torch again": ("-c", "import torch"),
        "import elastane": ("-c", "import elastane"),
        "elastane --help": ("-m", "elastane", "--help"),
        "torchrun --help": ("-m", "torch.distributed.run", "--help"),
    }


def first_steps(workers: int) -> Mapping[str, Sequence[str]]:
    """Return the arguments of the launchers; `{folder}` stands for an empty one."""
    elastane = ("-m", "elastane", "run", "--workers", str(workers), "--run-dir", "{folder}/run")
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}")
    return {
        "elastane run": (*elastane, "-m", _SCRIPT, "session", "{folder}"),
        "torchrun": (*torchrun, "-m", _SCRIPT, "plain", "{folder}"),
        "torchrun again": (*torchrun, "-m", _SCRIPT, "plain", "{folder}"),
        "torchrun, session": (*torchrun, "-m", _SCRIPT, "session", "{folder}"),
    }


def seconds_of(arguments: Sequence[str]) -> float:
    """Return how long a command takes.

    Raises:
        click.ClickException: it failed.
    """
    began = time.monotonic()
    _run(arguments)
    return time.monotonic() - began


def seconds_to_first_step(arguments: Sequence[str], *, workers: int) -> float:
    """Return the time until the last worker of a job had made its first step.

    Raises:
        click.ClickException: it failed, or not all of them made one.
    """
    with tempfile.TemporaryDirectory(prefix="elastane-startup-") as folder:
        began = time.monotonic()
        _run([one.format(folder=folder) for one in arguments])
        ends = [float(path.read_text()) for path in Path(folder).glob("*.done")]
    if len(ends) != workers:
        raise click.ClickException(f"{len(ends)} of {workers} workers made a step")
    return max(ends) - began


def _run(arguments: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=worker_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode:
        said = done.stdout.decode(errors="replace")[-2000:]
        raise click.ClickException(f"{' '.join(arguments)} failed:\n{said}")


def measure(
    actions: Mapping[str, Callable[[], float]], *, rounds: int, console: Console
) -> list[dict[str, Any]]:
    """Return a row for each action; the first round, with cold caches, does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for number in range(rounds + 1):
        shift = number % len(names)
        for name in (*names[shift:], *names[:shift]):
            taken = actions[name]()
            if number > 0:
                seconds[name].append(taken)
        console.print(f"round {number} of {rounds}")
    return [{"what": name, **spread(values)} for name, values in seconds.items()]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return median and quartiles in milliseconds.

    Example:
        >>> spread([0.1, 0.2, 0.4])
        {'ms_median': 200.0, 'ms_q1': 150.0, 'ms_q3': 300.0, 'rounds': 3}
    """
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    numbers = {"ms_median": median, "ms_q1": q1, "ms_q3": q3}
    return {
        **{name: round(1e3 * value, 1) for name, value in numbers.items()},
        "rounds": len(values),
    }


def draw(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    table = Table(title="Milliseconds to start")
    table.add_column("what")
    for name in ("workers", "median", "q1-q3"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(row["what"], str(row["workers"] or "-"), f"{row['ms_median']:.0f}"),
            f"{row['ms_q1']:.0f}-{row['ms_q3']:.0f}",
        )
    return table


@click.command(help="Time how commands and jobs start.")
@click.option("--json", "json_path", metavar="PATH|-", help="Write JSON here; - for stdout.")
@click.option("--quick", is_flag=True, help="Two rounds: to see that it runs.")
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(2))
def main(json_path: str | None, quick: bool, rounds: int) -> None:
    console = Console(stderr=True)
    rounds = 2 if quick else rounds
    with ending_on_sigterm():
        plain = {name: partial(seconds_of, one) for name, one in commands().items()}
        rows = [{**row, "workers": None} for row in measure(plain, rounds=rounds, console=console)]
        for workers in WORKERS:
            jobs = {
                name: partial(seconds_to_first_step, one, workers=workers)
                for name, one in first_steps(workers).items()
            }
            found = measure(jobs, rounds=rounds, console=console)
            rows += [{**row, "workers": workers} for row in found]
    console.print(draw(rows))
    result = {"benchmark": "startup", "rows": rows, "versions": versions()}
    write_json(result, path=json_path)


if __name__ == "__main__":
    main()
