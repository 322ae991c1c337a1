"""The rounds of a blackout run: let a job train, kill all of it, look at what is left, go on.

Knows the order of things; who kills, who looks and who follows the steps lies beside it.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.blackout.job import Job
from benchmarks.blackout.lineage import Lineage, Stand
from benchmarks.blackout.shelf import DAMAGES, Look, damage, drafts, look
from benchmarks.launched import wait_until
from benchmarks.resize.job import Tail
from elastane.launch.folder import log_paths

__all__ = ["Round", "Rounds", "prepare"]

_WAIT_LIMIT_S, _POLL_S = 90.0, 0.001
_END_LIMIT_S = 600.0
_IN_WRITE_S = 0.012
_ANY_TIME_S = 12.0
_GAP_S = 0.1
_AIMS = ("write", "write", "publish", "write", "step", "write", "write", "any time")


def prepare(folder: Path, setup: dict[str, Any]) -> int:
    """Write the digits and what workers have to know; return how many digits there are."""
    from examples.digits.data import load_digits

    arrays = {}
    for part, digits in zip(("train", "held_out"), load_digits(), strict=True):
        images, labels = digits.tensors
        arrays |= {f"{part}_images": images.numpy(), f"{part}_labels": labels.numpy()}
    folder.mkdir(parents=True)
    np.savez(folder / "digits.npz", **arrays)
    (folder / "setup.json").write_text(json.dumps(setup))
    return len(arrays["train_labels"])


@dataclass(slots=True, kw_only=True)
class Round:
    """One blackout, and the resume before it.

    Attributes:
        number: from 1.
        workers: that the job had.
        aim: when it was killed: "write", while a checkpoint was being written; "publish", right
            after; "step", after a number of steps; "any time", a time after its start.
        resumed_at: step from which it went on, or `None` if it was killed too early.
        steps_back: committed steps that were lost in the blackout before.
        steps_allowed: as many were allowed to be.
        damaged: what was done to the newest checkpoint in the blackout before.
        named: whether the warning of each worker named it.
        reached: committed steps at the end.
        newest: step of the newest checkpoint then.
        in_write: steps that were made since the write began that was cut; `None`: none was cut.
    """

    number: int
    workers: int
    aim: str
    resumed_at: int | None = None
    steps_back: int = 0
    steps_allowed: int = 0
    damaged: str = ""
    named: bool = False
    reached: int = 0
    newest: int | None = None
    in_write: int | None = None


class Rounds:
    """All blackouts of one job.

    Args:
        job: that is killed.
        seed: of what happens when.
        interval: steps between two checkpoints.
        num_samples: length of the dataset.

    Attributes:
        done: the rounds.
        lineage: of the job's steps.
        problems: sentences on what was not as it must be.
    """

    def __init__(self, job: Job, *, seed: int, interval: int, num_samples: int) -> None:
        self._job = job
        self._draw = random.Random(seed)
        self._interval = interval
        self._folder = job.run_dir / "checkpoints"
        self._tails: dict[Path, Tail] = {}
        self._stands: list[Stand] = []
        self._chances = 0
        self._known_drafts: frozenset[str] = frozenset()
        self._damaged: dict[str, str] = {}  # what was done, by the checkpoint's name
        self._expected = self._allowed = 0
        self._fresh_damage = ""
        self.done: list[Round] = []
        self.lineage = Lineage(num_samples)
        self.problems: list[str] = []

    def black_out(self, number: int) -> None:
        """Start the job, kill all of it at some time, and check what there is."""
        workers = self._draw.randint(1, self._job.max_workers)
        this = Round(number=number, workers=workers, aim=_AIMS[(number - 1) % len(_AIMS)])
        self._job.start(workers)
        self._wait_for(this.aim)
        gaps_s = (
            []
            if this.aim in ("write", "publish")
            else [self._draw.uniform(0, _GAP_S) for _ in range(6)]
        )
        self._job.kill(launcher_first=self._draw.random() < 0.5, gaps_s=gaps_s)
        self._check_resume(this)
        self._check_shelf(this)
        self.done.append(this)
        click.echo(json.dumps(asdict(this)), err=True)

    def finish(self) -> None:
        """Start the job with most workers and let it train to its end."""
        workers = self._job.max_workers
        this = Round(number=len(self.done) + 1, workers=workers, aim="end")
        self._job.start(workers)
        code = self._job.wait(limit_s=_END_LIMIT_S)
        if code:
            self.problems.append(f"the last launcher ended with exit code {code}")
        self._check_resume(this)
        self.done.append(this)

    def _wait_for(self, aim: str) -> None:
        if aim == "any time":
            time.sleep(self._draw.uniform(0, _ANY_TIME_S))
            return
        if aim == "step":
            least = self._draw.randint(1, 2 * self._interval)
            self._wait(lambda: self._count_steps() >= least, what=f"training of {least} steps")
            return
        seen: set[str] = set()
        # Two whole ones are left by the first round, so that one can be damaged.
        least = self._draw.randint(1, 2) if self.done else 3
        self._wait_for_draft(least, seen)
        if aim == "publish":
            self._wait(lambda: not seen & drafts(self._folder).keys(), what="its publication")
            time.sleep(self._draw.uniform(0, _IN_WRITE_S))
            return
        within_s = _IN_WRITE_S
        while not self._cut(seen, after_s=self._draw.uniform(0, within_s)):
            within_s /= 2
            self._wait_for_draft(len(seen) + 1, seen)

    def _cut(self, seen: set[str], *, after_s: float) -> bool:
        """Stop all workers and return whether one is writing; if not, let them go on."""
        time.sleep(after_s)
        self._job.freeze()
        if seen & drafts(self._folder).keys():
            return True
        self._job.thaw()
        return False

    def _wait(self, fact: Any, *, what: str) -> None:
        def is_so() -> bool:
            self._job.check()
            return fact()

        wait_until(is_so, limit_s=_WAIT_LIMIT_S, what=what, poll_s=_POLL_S)

    def _wait_for_draft(self, number: int, seen: set[str]) -> None:
        self._wait(lambda: self._see_drafts(seen) >= number, what=f"checkpoint {number}")

    def _see_drafts(self, seen: set[str]) -> int:
        seen |= drafts(self._folder).keys() - self._known_drafts
        return len(seen)

    def _count_steps(self) -> int:
        self._read()
        return len({(one.generation, one.step) for one in self._stands if one.kind == "step"})

    def _read(self) -> None:
        for path in (self._job.folder / "stands").glob("*.jsonl"):
            lines = self._tails.setdefault(path, Tail(path)).new()
            self._stands += [Stand(**line) for line in lines]

    def _check_resume(self, this: Round) -> None:
        """Check that the job went on from where the last look says."""
        self._read()
        resume, self._stands = self.lineage.extend(self._stands), self._stands[:0]
        this.reached = self.lineage.reached
        if resume is None:
            return
        this.resumed_at, this.steps_back = resume.step, resume.steps_back
        this.steps_allowed, this.damaged = self._allowed, self._fresh_damage
        if resume.step != self._expected:
            self.problems.append(
                f"round {this.number} went on from step {resume.step}, and the newest whole "
                f"checkpoint was of step {self._expected}"
            )
        if self._fresh_damage:
            this.named = self._is_named(resume.workers)
        self._fresh_damage = ""

    def _is_named(self, workers: frozenset[int]) -> bool:
        """Return whether each worker's log names the damaged checkpoint as passed over."""
        name = next(reversed(self._damaged))
        logs = [log_paths(self._job.run_dir, worker)[1].read_text() for worker in workers]
        return all(f"{name} " in log and "the one before is used" in log for log in logs)

    def _check_shelf(self, this: Round) -> None:
        """Check what the blackout left, and damage some of it for the next round."""
        found = look(self._folder, known_drafts=self._known_drafts)
        self._known_drafts = frozenset(drafts(self._folder))
        for name in found.torn - self._damaged.keys():
            self.problems.append(f"round {this.number} left the torn checkpoint {name}")
        this.newest = found.newest.manifest.step if found.newest else None
        self._expected, newest = this.newest or 0, this.newest or 0
        if found.newest and not self.lineage.has(newest):
            self.problems.append(f"the checkpoint of step {newest} is of a step that is void")
        if found.draft_step is not None:
            this.in_write = max(this.reached - found.draft_step, 0)
        if this.resumed_at is None:
            return
        self._allowed = self._interval + (1 if this.in_write is None else this.in_write)
        self._damage(found, resumed_at=this.resumed_at)

    def _damage(self, found: Look, *, resumed_at: int) -> None:
        """Damage every other newest checkpoint that is new and has one before it."""
        if not (found.newest and found.before) or found.newest.manifest.step <= resumed_at:
            return
        self._chances += 1
        if self._chances % 2 == 0:
            return
        kind = DAMAGES[len(self._damaged) % len(DAMAGES)]
        file = damage(found.newest, kind, draw=self._draw)
        self._damaged[found.newest.path.name] = self._fresh_damage = f"{file} {kind}"
        self._expected = found.before.manifest.step
        self._allowed += self._interval
