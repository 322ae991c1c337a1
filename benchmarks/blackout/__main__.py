"""Blackout: a real job, of which every process is killed again and again, also while it saves.

    python -m benchmarks.blackout [--kills 20] [--seed 0] [--json PATH|-]

In each round the job is started with some number of workers, trains the digits, and is killed:
launcher and all workers, in most rounds while a checkpoint is being written. Now and then the
newest checkpoint is then damaged on purpose. At last the job trains to its end. Checked are:

- it goes on from the newest whole checkpoint, with the same weights, optimizer state, schedule,
  progress and position as at that step before; no torn checkpoint has been published;
- so at most one interval back, plus the steps made while the newest one was being written, which
  are fewer than another interval; and one interval more where the newest one was damaged;
- each worker's log names the damaged checkpoint;
- every sample counts once in each epoch, and no process is left behind.

The exit code is 1 if one of these promises was broken.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from benchmarks.blackout.job import Job
from benchmarks.blackout.run import Round, Rounds, prepare
from benchmarks.chaos.audit import audit, orphans
from benchmarks.launched import JobError
from benchmarks.output import write_json

_NUM_INTERVALS, _NUM_INTERVALS_A_KILL = 15, 10  # in base steps, of which a step makes up to 4


def blackout(
    folder: Path, *, kills: int, seed: int, workers: int, interval: int, step_s: float
) -> dict[str, Any]:
    """Black out a job in a folder that does not exist yet, and return what came of it."""
    started = time.monotonic()
    num_steps = interval * (_NUM_INTERVALS + _NUM_INTERVALS_A_KILL * kills)
    setup = {"num_steps": num_steps, "interval": interval, "step_s": step_s}
    num_samples = prepare(folder, setup)
    name = f"blackout-{os.getpid()}-{seed}"
    job = Job(folder=folder.resolve(), name=name, max_workers=workers)
    rounds = Rounds(job, seed=seed, interval=interval, num_samples=num_samples)
    with job.ended():
        try:
            for number in range(1, kills + 1):
                rounds.black_out(number)
            rounds.finish()
        except JobError as error:
            rounds.problems.append(str(error))
        left = orphans(name)
    found = audit(folder, num_samples=num_samples)
    return {
        "benchmark": "blackout",
        "seed": seed,
        "max_workers": workers,
        "interval": interval,
        "num_steps": num_steps,
        **summary(rounds.done, interval=interval),
        "orphans": len(left),
        "final_accuracy": _accuracy(folder),
        "steps": rounds.lineage.reached,
        "steps_made_again_alike": rounds.lineage.num_alike,
        **{name: found[name] for name in ("samples_lost", "samples_repeated", "replicas_equal")},
        "problems": [*rounds.problems, *rounds.lineage.problems, *found["problems"]],
        "wall_s": round(time.monotonic() - started, 1),
        "rounds": [asdict(one) for one in rounds.done],
        "versions": versions(),
    }


def summary(rounds: Sequence[Round], *, interval: int) -> dict[str, Any]:
    """Return counts and maxima over the rounds; the last of them is not a blackout."""
    cut = [one.in_write for one in rounds if one.in_write is not None]
    resumed = [one for one in rounds if one.resumed_at is not None]
    after_damage = [one for one in resumed if one.damaged]
    plain = [one.steps_back for one in resumed if not one.damaged]
    return {
        "kills": sum(one.aim != "end" for one in rounds),
        "in_write": len(cut),
        "resumes": sum(one.number > 1 for one in resumed),
        "max_steps_back": max(plain, default=0),
        "max_steps_in_write": max(cut, default=0),
        "damaged": len(after_damage),
        "named": sum(one.named for one in after_damage),
        "max_steps_back_damaged": max((one.steps_back for one in after_damage), default=0),
        "lost_progress_beyond_interval": sum(
            max(one.steps_back - one.steps_allowed, 0) for one in resumed
        ),
        "writes_longer_than_interval": sum(steps >= interval for steps in cut),
    }


def keeps_promises(result: dict[str, Any], *, kills: int) -> bool:
    """Return whether everything went on as promised."""
    none = ("lost_progress_beyond_interval", "writes_longer_than_interval", "orphans")
    return (
        not any(result[name] for name in (*none, "samples_lost", "samples_repeated", "problems"))
        and result["kills"] == kills
        and result["in_write"] >= kills / 2
        and result["named"] == result["damaged"]
        and result["replicas_equal"]
        and result["final_accuracy"] is not None
    )


def versions() -> dict[str, str]:
    """Return the versions of what took part."""
    found = {name: version(name) for name in ("elastane", "torch")}
    return found | {"python": platform.python_version()}


def _accuracy(folder: Path) -> float | None:
    path = folder / "accuracy.json"
    return json.loads(path.read_text()) if path.exists() else None


@click.command()
@click.option("--kills", default=20, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True, help="Of what happens when.")
@click.option("--json", "json_path", metavar="PATH|-", default="-", help="Where the result goes.")
@click.option("--workers", default=4, show_default=True, type=click.IntRange(1, 4), help="Most.")
@click.option("--interval", default=20, show_default=True, help="Steps between two checkpoints.")
@click.option("--step-time", "step_s", default=0.01, show_default=True, help="Seconds, at least.")
@click.option("--out", metavar="FOLDER", type=click.Path(path_type=Path), help="Kept if given.")
def main(kills: int, json_path: str, out: Path | None, **given: Any) -> None:
    """Kill all of a job again and again, and check how it goes on."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the job, too
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch) / "black out"
        if folder.exists():
            raise click.BadParameter(f"{folder} exists: each run needs a folder of its own")
        result = blackout(folder, kills=kills, **given)
    write_json(result, path=json_path)
    sys.exit(0 if keeps_promises(result, kills=kills) else 1)


if __name__ == "__main__":
    main()
