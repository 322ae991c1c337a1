"""The coordinator: a thread that takes facts and wishes in turn and has the job decided.

Knows when to look, when to act and when to go; nothing of what is decided.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from elastane.errors import check_between
from elastane.launch.decider import Decider
from elastane.launch.desk import Desk, Item
from elastane.launch.folder import LauncherRecord
from elastane.launch.link import LOST
from elastane.launch.verdict import Verdict
from elastane.membership import name_workers
from elastane.protocol import Draining, EndAgent, Generation, Hello, Message, Ready
from elastane.roster import Rules

__all__ = ["TICK_S", "Coordinator"]

TICK_S = 0.05
"""Seconds after which the coordinator decides anew though nothing came in."""

_GATHER_S = 0.02
_ADOPT_S = 3.0
_FAREWELL_S = 3.0
_END_GRACE_S = 5.0
_ANSWER_LIMIT_S = 10.0


class Coordinator:
    """Runs a job's membership on a thread of its own, for the length of a block.

    The methods may be called from any thread, `stop` and `kill` from a signal handler too.

    Args:
        address: HOST:PORT of the store.
        run_dir: the run's folder.
        record: what an earlier launcher left in the folder, or a fresh record.
        rules: what the job keeps to.
        say: shows a message.
    """

    def __init__(
        self,
        *,
        address: str,
        run_dir: Path,
        record: LauncherRecord,
        rules: Rules,
        say: Callable[[str], None],
    ) -> None:
        self._rules = rules
        self._say = say
        self._desk = Desk(address, say=say)
        self._job = Decider(self._desk, run_dir=run_dir, record=record, rules=rules, say=say)
        self._farewells: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="elastane coordinator", daemon=True)

    def __enter__(self) -> Self:
        self._desk.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._job.verdict is None:
            self.kill()
        self._thread.join()
        self._desk.__exit__()

    def status(self) -> dict[str, Any]:
        """Return what `elastane status` shows."""
        return self._job.status()

    def is_over(self) -> bool:
        """Return whether the job has ended, or was asked to."""
        return self._job.roster.stopping or self._job.verdict is not None

    def scale(self, n: int, worker: int | None = None) -> str:
        """Have `n` workers from now on; a named worker leaves first.

        Raises:
            ArgumentError: `n` is out of range, or there is no such worker.
            UsageError: the job is ending.
        """
        least, most = self._rules.min_workers, self._rules.max_workers
        way_out = "The job was started with this range (--workers)."
        check_between("n", n, at_least=least, at_most=most, way_out=way_out)
        return self._ask(lambda: self._job.scale(n, worker))

    def stop(self) -> str:
        """Have all workers write a checkpoint and leave."""
        self._desk.items.put(self._job.stop)
        return "workers write a checkpoint and leave"

    def kill(self) -> str:
        """End all workers at once."""
        self._desk.items.put(self._kill)
        return "workers are killed"

    def _ask(self, action: Callable[[], str]) -> str:
        """Have the coordinator's thread do something, and return its answer."""
        answer: Future[str] = Future()

        def act() -> None:
            try:
                answer.set_result(action())
            except Exception as error:
                answer.set_exception(error)

        self._desk.items.put(act)
        return answer.result(timeout=_ANSWER_LIMIT_S)

    # From here on everything runs on the coordinator's own thread.

    def _run(self) -> None:
        try:
            if self._job.record.agents:
                self._adopt()
            while self._job.verdict is None:
                self._take(TICK_S)
                self._job.look()
                self._job.act()
        except Exception:
            reason = f"the launcher failed:\n{traceback.format_exc()}"
            self._job.conclude(Verdict(code=1, state="failed", reason=reason))
        with suppress(*LOST):
            self._say_farewell()

    def _take(self, timeout_s: float) -> None:
        """Take what came in; wait a moment for others when a worker is ready to join."""
        deadline = time.monotonic() + timeout_s
        while (item := self._desk.next_item(deadline - time.monotonic())) is not None:
            self._note(item)
            deadline = time.monotonic() + (_GATHER_S if isinstance(item, Ready) else 0.0)

    def _note(self, item: Item) -> None:
        if not isinstance(item, Message):
            item()
            return
        if isinstance(item, Draining) and self._job.verdict is not None:
            self._farewells.add(item.agent)
        self._job.note(item)

    def _kill(self) -> None:
        self._job.conclude(Verdict(code=130, state="failed", reason="killed as asked"))

    def _say_farewell(self) -> None:
        """Have all agents end, and wait a little until those on other machines know."""
        code = 1 if self._job.verdict is None else self._job.verdict.code
        grace_s = 0.0 if code == 130 else _END_GRACE_S
        others = self._job.agents_elsewhere()
        for agent in self._job.roster.agents:
            self._desk.order(agent, EndAgent(grace_s=grace_s, code=code))
        deadline = time.monotonic() + _FAREWELL_S + grace_s
        while others - self._farewells and time.monotonic() < deadline:
            self._take(TICK_S)

    def _adopt(self) -> None:
        """Meet the workers that outlived an earlier launcher, and take up its generation."""
        deadline = time.monotonic() + _ADOPT_S
        while time.monotonic() < deadline and not self._has_met_all():
            item = self._desk.next_item(TICK_S)
            if isinstance(item, Hello):
                told = Generation.from_mapping(item.generation)
                self._job.now = max(self._job.now, told, key=lambda one: one.number)
            if item is not None:
                self._note(item)
            self._job.look()
        found = self._job.take_up()
        self._say(f"started again: {name_workers(found)} went on meanwhile")

    def _has_met_all(self) -> bool:
        """Return whether all agents of the earlier launcher, and their live members, spoke."""
        roster = self._job.roster
        silent = [w for w in roster.workers.values() if not (w.spoke or w.exited)]
        all_agents = set(self._job.record.agents) <= set(roster.agents)
        return all_agents and not any(w.worker in self._job.now.members for w in silent)
