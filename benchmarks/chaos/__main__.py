"""Chaos: a real job, to which something happens every second, and an audit of what it trained.

    python -m benchmarks.chaos [--events 200] [--seed 0] [--json PATH|-] [--picture PATH]

The exit code is 1 if a promise was broken: a sample lost or repeated, unequal replicas, a stall
above the hang limit + 1 s, a process left behind, or a step that was shown as final and made again.
The kinds of events are listed in `benchmarks.chaos.events`, the audit's rules in `audit`.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from benchmarks.chaos.job import Job
from benchmarks.chaos.run import Run, prepare, run_chaos
from benchmarks.output import write_json

_STALL_MARGIN_S = 1.0
_ONLY_FOR_THE_PICTURE = ("sizes", "stalls", "ended")


def keeps_promises(result: dict[str, Any]) -> bool:
    """Return whether nothing was lost, repeated, unequal, late, left behind or taken back."""
    counts = ("samples_lost", "samples_repeated", "orphans", "false_commits")
    return (
        not any(result[name] for name in counts)
        and result["replicas_equal"]
        and result["max_stall_s"] <= result["stall_limit_s"]
        and not result["problems"]
    )


def versions() -> dict[str, str]:
    """Return the versions of what took part."""
    found = {name: version(name) for name in ("elastane", "torch")}
    return found | {"python": platform.python_version()}


@click.command()
@click.option("--events", default=200, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True, help="Of the events.")
@click.option("--json", "json_path", metavar="PATH|-", default="-", help="Where the result goes.")
@click.option("--workers", default=4, show_default=True, type=click.IntRange(min=2))
@click.option("--every", "every_s", default=1.0, show_default=True, help="Mean seconds between.")
@click.option(
    "--gathered", default=0.3, show_default=True, help="Share of events that wait for all workers."
)
@click.option("--hang-limit", "hang_limit_s", default=1.5, show_default=True)
@click.option("--step-time", "step_s", default=0.01, show_default=True, help="Seconds, at least.")
@click.option("--checkpoint-steps", default=100, show_default=True, help="Between two; 0: none.")
@click.option("--out", metavar="FOLDER", type=click.Path(path_type=Path), help="Kept if given.")
@click.option("--picture", metavar="PATH", type=click.Path(path_type=Path))
def main(
    events: int, seed: int, json_path: str, out: Path | None, picture: Path | None, **given: Any
) -> None:
    """Do random things to a job and audit it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the job, too
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch) / "chaos"
        if folder.exists():
            raise click.BadParameter(f"{folder} exists: each run needs a folder of its own")
        result = chaos(folder, num_events=events, seed=seed, **given)
        if picture is not None and result["committed_steps"]:
            from benchmarks.chaos.picture import draw

            draw(folder, result, path=picture)
    shown = {name: result[name] for name in result if name not in _ONLY_FOR_THE_PICTURE}
    write_json(shown, path=json_path)
    sys.exit(0 if keeps_promises(result) else 1)


def chaos(
    folder: Path,
    *,
    num_events: int,
    seed: int,
    workers: int,
    every_s: float,
    gathered: float,
    hang_limit_s: float,
    step_s: float,
    checkpoint_steps: int,
) -> dict[str, Any]:
    """Run chaos in a folder that does not exist yet, and return the whole result."""
    name = f"chaos-{os.getpid()}-{seed}"
    setup = {"job": name, "step_s": step_s, "checkpoint_steps": checkpoint_steps}
    prepare(folder, setup)
    job = Job(folder=folder.resolve(), name=name, max_workers=workers, hang_limit_s=hang_limit_s)
    checkpoints = checkpoint_steps > 0
    run = Run(job, seed=seed, every_s=every_s, gathered=gathered, checkpoints=checkpoints)
    result = run_chaos(job.folder, job=job, run=run, num_events=num_events)
    settings = {
        "seed": seed,
        "workers": workers,
        "every_s": every_s,
        "step_s": step_s,
        "hang_limit_s": hang_limit_s,
        "stall_limit_s": hang_limit_s + _STALL_MARGIN_S,
    }
    return {"benchmark": "chaos", **settings, **result, "versions": versions()}


if __name__ == "__main__":
    main()
