"""Does to a job what an event says, at the moment that the event is about.

Knows how each kind of event is done; nothing of which comes when.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.chaos.events import Event, is_possible
from benchmarks.chaos.job import Job
from benchmarks.chaos.records import read_lines, record_path
from benchmarks.chaos.watch import View, Watch
from benchmarks.launched import wait_until

__all__ = ["Performer"]

_RARE_LIMIT_S = 15.0
_ADOPT_LIMIT_S = 60.0
_LONGEST_TRANSFER_S = 0.04
_LONGEST_WRITE_S = 0.005
_LONGEST_ABSENCE_S = 1.0
_LOOK_S = 0.001


class Performer:
    """Does events to a job.

    Args:
        job: to which.
        watch: sees it.
        draw: the seeded generator of the whole run.
    """

    def __init__(self, job: Job, *, watch: Watch, draw: random.Random) -> None:
        self._job = job
        self._watch = watch
        self._draw = draw

    def perform(self, event: Event, view: View) -> dict[str, Any]:
        """Do what an event says and return what was done, for the script."""
        started = time.monotonic()
        if event.target:
            self._scale(event)
        elif event.kind in ("pause", "freeze"):
            self._hold(event, view)
        elif event.kind == "kill_launcher":
            return self._replace_launcher()
        elif event.kind == "kill_joiner":
            return self._kill_joiner(view)
        elif event.kind == "kill_in_checkpoint":
            return self._kill_in_checkpoint()
        else:
            self._send(signal.SIGKILL, event.workers, view)
        return {"time": started, "workers": event.workers, "target": event.target}

    def _scale(self, event: Event) -> None:
        self._watch.target = event.target
        worker = event.workers[0] if event.workers else None
        self._job.ask("scale", n=event.target, worker=worker)

    def _send(self, number: signal.Signals, workers: Iterable[int], view: View) -> None:
        for worker in workers:
            with suppress(ProcessLookupError, KeyError):  # gone already, or already buried
                os.kill(view.pids[worker], number)

    def _hold(self, event: Event, view: View) -> None:
        """Stop a worker; after the hang limit, let it find out that it was left behind."""
        self._send(signal.SIGSTOP, event.workers, view)
        self._watch.stopped |= set(event.workers)
        if event.kind == "pause":
            limit_s = self._job.hang_limit_s
            time.sleep(limit_s + self._draw.uniform(0.4, 0.4 + 0.4 * limit_s))
            self._send(signal.SIGCONT, event.workers, view)
            self._watch.stopped -= set(event.workers)

    def _replace_launcher(self) -> dict[str, Any]:
        """Kill the launcher and start it again; tell whether a change was under way."""
        killed = time.monotonic()
        self._job.kill_launcher()
        in_change = not self._watch.look().is_settled(at_step=0)
        time.sleep(self._draw.uniform(0.0, _LONGEST_ABSENCE_S))
        self._job.start_launcher()

        def is_back() -> bool:
            return self._job.ask("status")["state"] == "running"

        wait_until(is_back, limit_s=_ADOPT_LIMIT_S, what="the launcher's return")
        return {"time": killed, "back": time.monotonic(), "in_change": in_change}

    def _kill_joiner(self, before: View) -> dict[str, Any]:
        """Kill the next newcomer while it gets its state, or shortly after."""
        let_in = self._await(lambda view: set(view.members) - set(before.members))
        if let_in is None:
            return {"time": time.monotonic(), "workers": (), "hit": False}
        newcomers = sorted(set(let_in.members) - set(before.members))
        time.sleep(self._draw.uniform(0.0, _LONGEST_TRANSFER_S))
        killed = time.monotonic()
        self._send(signal.SIGKILL, newcomers[:1], let_in)
        lines = read_lines(record_path(self._job.folder, newcomers[0]))
        was_in = any(line.get("generation") == let_in.generation for line in lines)
        return {"time": killed, "workers": newcomers[:1], "hit": not was_in}

    def _kill_in_checkpoint(self) -> dict[str, Any]:
        """Kill rank 0 while it writes a checkpoint, or shortly after."""
        folder = self._job.run_dir / "checkpoints"
        view = self._await(lambda view: is_possible("kill_in_checkpoint", view) and _drafts(folder))
        if view is None:
            return {"time": time.monotonic(), "workers": (), "hit": False}
        time.sleep(self._draw.uniform(0.0, _LONGEST_WRITE_S))
        killed = time.monotonic()
        self._send(signal.SIGKILL, view.members[:1], view)
        return {"time": killed, "workers": view.members[:1], "hit": bool(_drafts(folder))}

    def _await(self, fact: Callable[[View], object]) -> View | None:
        """Return the first view of which a fact holds; `None` if none comes in time."""
        deadline = time.monotonic() + _RARE_LIMIT_S
        while time.monotonic() < deadline:
            view = self._watch.look()
            if fact(view):
                return view
            time.sleep(_LOOK_S)
        return None


def _drafts(folder: Path) -> list[Path]:
    return list(folder.glob(".step-*.part"))
