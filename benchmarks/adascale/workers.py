"""A run on real workers, whose number changes at random while it trains.

Starts `elastane run`, changes the number as `elastane scale` does, and reads the run's events.
Knows nothing of how the workers train.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.launched import JobError, LaunchedJob, wait_until
from benchmarks.runs.training import late_loss
from benchmarks.tasks import load_task
from elastane.telemetry import EVENTS_NAME

__all__ = ["RESULT_NAME", "SETUP_NAME", "random_sizes", "steps_in", "summary", "train_on_workers"]

SETUP_NAME, RESULT_NAME = "setup.json", "result.json"
_MOST_WORKERS = 4
_CHANGES = 4
_FIRST_PART, _LAST_PART = 0.05, 0.85
# Sleeping makes a run long enough for workers, which take seconds to start, to come in time.
_STEP_S = 0.1
_LIMIT_S, _POLL_S = 1800.0, 0.5


@dataclass(slots=True, kw_only=True)
class _Job(LaunchedJob):
    worker = "benchmarks.adascale.worker"


def random_sizes(seed: int) -> list[tuple[float, int]]:
    """Return from which part of the run on how many workers are wanted, each another number."""
    draw = random.Random(seed)
    sizes = [(0.0, draw.randint(1, _MOST_WORKERS))]
    for part in sorted(draw.uniform(_FIRST_PART, _LAST_PART) for _ in range(_CHANGES)):
        others = [size for size in range(1, _MOST_WORKERS + 1) if size != sizes[-1][1]]
        sizes.append((part, draw.choice(others)))
    return sizes


def train_on_workers(spec: Mapping[str, Any], needs: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    """Train once, while the number of workers changes.

    Raises:
        JobError: the job did not come to its end.
    """
    sizes = random_sizes(spec["seed"])
    task = load_task(spec["task"])
    recipe = task.quick_recipe if spec["quick"] else task.recipe
    with tempfile.TemporaryDirectory(prefix="elastane-adascale-") as name:
        folder = Path(name)
        (folder / SETUP_NAME).write_text(json.dumps({**spec, "step_s": _STEP_S}))
        job = _Job(
            folder=folder, name=f"adascale-{os.getpid()}-{spec['seed']}", max_workers=_MOST_WORKERS
        )
        try:
            job.launch({"--initial": str(sizes[0][1])})
            _change(job, sizes[1:], num_steps=recipe.num_steps)
            code = job.wait(limit_s=_LIMIT_S)
        finally:
            job.end()
        if code:
            log = (folder / "launcher.log").read_text(errors="replace")
            raise JobError(f"the job ended with exit code {code}: {log[-300:]}")
        found = json.loads((folder / RESULT_NAME).read_text())
        return found | summary(steps_in(job.run_dir / EVENTS_NAME), num_steps=recipe.num_steps)


def _change(job: LaunchedJob, sizes: Sequence[tuple[float, int]], *, num_steps: int) -> None:
    """Ask for another number of workers whenever the run has come far enough."""
    path = job.run_dir / EVENTS_NAME

    def reached(tau: float) -> bool:
        job.check()
        steps = steps_in(path)
        return bool(steps) and steps[-1]["progress"] >= tau

    for part, size in sizes:
        tau = part * num_steps
        what = f"base step {tau:.0f}"
        wait_until(lambda tau=tau: reached(tau), limit_s=_LIMIT_S, what=what, poll_s=_POLL_S)
        job.ask("scale", n=size)


def steps_in(path: Path) -> list[dict[str, Any]]:
    """Return the step events so far."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == "step"]


def summary(steps: Sequence[Mapping[str, Any]], *, num_steps: int) -> dict[str, Any]:
    """Return number of steps and training loss, and from which part on there were how many."""
    stretches = groupby(steps, key=lambda step: step["world_size"])
    firsts = [(next(group)["progress"] / num_steps, size) for size, group in stretches]
    trace = {
        "tau": [step["progress"] for step in steps],
        "loss": [step["loss"] for step in steps],
    }
    return {
        "steps": steps[-1]["step"],
        "train_loss": late_loss(trace, num_steps=num_steps),
        "sizes": [[round(part, 3), size] for part, size in firsts],
    }
