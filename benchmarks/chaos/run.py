"""One chaos run: prepares its folder, plays events to a job, stops it and has it audited.

Knows the order of things; what an event does and when it is possible, others know.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.chaos.deeds import Performer
from benchmarks.chaos.events import Deck, Event
from benchmarks.chaos.job import Job
from benchmarks.chaos.watch import View, Watch
from benchmarks.launched import JobError, wait_until

__all__ = ["Run", "audited", "prepare", "run_chaos"]

_START_LIMIT_S = 120.0
_SETTLE_LIMIT_S = 60.0
_STOP_LIMIT_S = 60.0
_DECK_PATIENCE_S = 10.0
_GATHER_LIMIT_S = 10.0
_STEPS_BETWEEN = 3


def prepare(folder: Path, setup: dict[str, Any]) -> None:
    """Write the digits, shrunk to 14 x 14, and what workers and audit have to know."""
    from torch.nn.functional import avg_pool2d

    from examples.digits.data import load_digits

    images, labels = load_digits()[0].tensors
    levels = avg_pool2d((images * 0.3081 + 0.1307) * 255, 2).flatten(1).round()
    folder.mkdir(parents=True)
    np.savez(folder / "digits.npz", images=levels.byte().numpy(), labels=labels.byte().numpy())
    setup = setup | {"num_samples": len(labels)}
    (folder / "setup.json").write_text(json.dumps(setup))


class Run:
    """The events of one run.

    Args:
        job: that runs.
        seed: of the events.
        every_s: mean time between events.
        gathered: share of the events that wait for all wanted workers, and so meet many.
        checkpoints: whether the job writes checkpoints.
    """

    def __init__(
        self, job: Job, *, seed: int, every_s: float, gathered: float, checkpoints: bool
    ) -> None:
        self._draw = random.Random(seed)
        self._deck = Deck(draw=self._draw)
        self._every_s = every_s
        self._gathered = gathered
        self._watch = Watch(job, target=job.max_workers, checkpoints=checkpoints)
        self._performer = Performer(job, watch=self._watch, draw=self._draw)
        self._script = job.folder / "script.jsonl"
        self.by_kind: Counter[str] = Counter()
        self.in_time: Counter[str] = Counter()  # deaths that met the moment they were aimed at

    def play(self, num_events: int) -> None:
        """Do so many events to the job, each after it has recovered from the one before.

        Raises:
            JobError: the job did not recover.
        """
        self._recover(after="the start", limit_s=_START_LIMIT_S)
        for number in range(1, num_events + 1):
            time.sleep(min(self._draw.expovariate(1 / self._every_s), 4 * self._every_s))
            if self._draw.random() < self._gathered:
                self._gather()
            event, view = self._next_event()
            click.echo(f"{number:5d} {event.kind} {event.workers or event.target or ''}", err=True)
            done = self._performer.perform(event, view)
            self._write({"number": number, "kind": event.kind, **done})
            self.by_kind[event.kind] += 1
            self.in_time[event.kind] += bool(done.get("hit"))
            self._recover(after=f"event {number}, {event.kind}", limit_s=_SETTLE_LIMIT_S)

    def _gather(self) -> None:
        """Wait a while for all wanted workers to be members."""
        with suppress(JobError):
            wait_until(
                lambda: len(self._watch.look().healthy) == self._watch.target,
                limit_s=_GATHER_LIMIT_S,
                what="the workers' coming",
            )

    def _next_event(self) -> tuple[Event, View]:
        """Wait until something is possible; where no worker is to come, take new cards."""
        asked = time.monotonic()
        while True:
            view = self._watch.look()
            event = self._deck.next_event(view)
            if event is not None:
                return event, view
            if not view.starting or time.monotonic() - asked > _DECK_PATIENCE_S:
                self._deck.shuffle_in()
            time.sleep(0.05)

    def _recover(self, *, after: str, limit_s: float) -> None:
        """Wait until all members of the newest generation have made a few steps."""
        begun = self._watch.look()
        step = max((one.step for one in begun.last_steps.values()), default=0) + _STEPS_BETWEEN
        wait_until(
            lambda: self._watch.look().is_settled(at_step=step),
            limit_s=limit_s,
            what=f"training of all members after {after}",
        )

    def _write(self, line: dict[str, Any]) -> None:
        with self._script.open("a") as file:
            file.write(json.dumps(line) + "\n")


def run_chaos(folder: Path, *, job: Job, run: Run, num_events: int) -> dict[str, Any]:
    """Run the job, do the events, stop it, audit it, and return the result."""
    started, problems = time.monotonic(), []
    with job.running():
        try:
            run.play(num_events)
            code = job.stop(limit_s=_STOP_LIMIT_S)
            if code:
                problems.append(f"the launcher ended with exit code {code}")
        except JobError as error:
            problems.append(str(error))
            job.ask_for_stacks()
        wall_s = time.monotonic() - started
        found = audited(folder)
    found["problems"] = problems + found["problems"]
    return {
        "events": sum(run.by_kind.values()),
        "by_kind": dict(sorted(run.by_kind.items())),
        "in_time": {kind: run.in_time[kind] for kind in sorted(+run.in_time)},
        **found,
        "wall_s": round(wall_s, 1),
    }


def audited(folder: Path) -> dict[str, Any]:
    """Return what the audit, a process of its own, finds."""
    command = [sys.executable, "-m", "benchmarks.chaos.audit", str(folder)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
