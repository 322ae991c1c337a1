"""Does what the pure decisions say: publishes generations, gives orders, keeps the records.

Knows the store's desk, the run folder and the clock; runs on one thread. What is decided is in
`elastane.membership`, who is started and ended in `staffing`, when the job is over in `verdict`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastane.errors import ArgumentError, UsageError, describe
from elastane.launch import facts
from elastane.launch.clock import AwakeClock
from elastane.launch.desk import Desk
from elastane.launch.folder import (
    LauncherRecord,
    add_generation,
    newest_generation,
    write_launcher,
)
from elastane.launch.report import report
from elastane.launch.staffing import End, Release, Start, ordered, staff
from elastane.launch.verdict import Verdict, judge, may_restart, restart_all
from elastane.membership import Decision, decide, exit_sentence, name_workers
from elastane.protocol import (
    AgentHere,
    EndAgent,
    EndWorker,
    Exited,
    Generation,
    Hello,
    Message,
    StartWorker,
)
from elastane.roster import Roster, Rules, is_lost, places_of

__all__ = ["LOOK_S", "Decider"]

LOOK_S = 0.1
"""Seconds between two looks at all beats."""


class Decider:
    """A job's state as its coordinator sees it. Only `status` may be called by other threads.

    Args:
        desk: the store.
        run_dir: the run's folder.
        record: what an earlier launcher left in the folder, or a fresh record.
        rules: what the job keeps to.
        say: shows a message.
        clock: tells seconds; by default those in which this process was awake.

    Attributes:
        now: the newest generation.
        roster: what is known of agents and workers.
        record: what the next launcher would have to know.
        verdict: how the job ended, once it has.
    """

    def __init__(
        self,
        desk: Desk,
        *,
        run_dir: Path,
        record: LauncherRecord,
        rules: Rules,
        say: Callable[[str], None],
        clock: AwakeClock | None = None,
    ) -> None:
        self._desk = desk
        self._run_dir = run_dir
        self._rules = rules
        self._say = say
        self._clock = clock or AwakeClock()
        self._next_look = 0.0
        self.record = record
        self.now = newest_generation(run_dir)
        self.roster = Roster(target=record.target, attempt=record.attempt)
        self.verdict: Verdict | None = None

    def status(self) -> dict[str, Any]:
        """Return what `elastane status` shows."""
        known = {"rules": self._rules, "verdict": self.verdict, "time": self._clock.now()}
        about = {"job": self.record.job, "run_dir": str(self._run_dir)}
        return about | report(self.now, self.roster, **known)

    def note(self, fact: Message) -> None:
        """Take a fact into account; nothing is done about it yet."""
        match fact:
            case Exited():
                self._tell_of(fact)
            case Hello():
                self._keep(worker_ids=max(self.record.worker_ids, fact.worker))
            case AgentHere():
                self._keep(agents=sorted({*self.record.agents, fact.agent}))
        self.roster = facts.fold(self.roster, fact, now=self.now, time=self._clock.now())
        if isinstance(fact, AgentHere) and fact.slots:
            self._count_places()

    def look(self) -> None:
        """Read beats and heartbeats, a few times a second."""
        now = self._clock.now()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        counts = self._desk.heartbeats(self.roster.agents)
        self.roster = facts.hear_agents(self.roster, counts, time=now)
        speaking = [w.worker for w in self.roster.workers.values() if w.spoke and not w.exited]
        self.roster = facts.hear_workers(self.roster, self._desk.beats(speaking), time=now)

    def act(self) -> None:
        """Decide, and do what was decided."""
        known = {"rules": self._rules, "time": self._clock.now()}
        decision = decide(self.now, self.roster, **known)
        if decision is not None:
            self._publish(decision)
        verdict = judge(self.now, self.roster, **known)
        if verdict is not None:
            self.conclude(verdict)
            return
        if may_restart(self.roster, **known):
            self._restart()
        self._carry_out(staff(self.now, self.roster, **known))
        self.roster = facts.forget(self.roster, now=self.now)

    def stop(self) -> None:
        """Have all workers write a checkpoint and leave."""
        if not self.roster.stopping:
            self._say("stopping: workers write a checkpoint and leave")
        self.roster = replace(self.roster, stopping=True)

    def scale(self, n: int, worker: int | None) -> str:
        """Have another number of workers; a named one leaves first."""
        if self.roster.stopping or self.roster.over or self.verdict is not None:
            raise UsageError("the job is ending: its workers can't be scaled any more")
        if worker is not None:
            self._dismiss(worker)
        before = self.roster.target
        self.roster = replace(self.roster, target=n)
        self._keep(target=n)
        places = len(places_of(self.roster, rules=self._rules, time=self._clock.now()))
        short = f"; the machines have {places} slots" if places < n else ""
        return f"{n} workers wanted, {before} before{short}"

    def conclude(self, verdict: Verdict) -> None:
        """End the job, unless it has ended."""
        if self.verdict is None:
            self.verdict = verdict
            self._say(f"{verdict.state}: {verdict.reason}")
            self._keep(state=verdict.state)

    def agents_elsewhere(self) -> set[str]:
        """Return the agents of other processes that are there, as far as anybody knows."""
        own, known = (socket.gethostname(), os.getpid()), self.roster.agents.values()
        time = self._clock.now()
        here = [a for a in known if not (a.dismissed or is_lost(a, rules=self._rules, time=time))]
        return {agent.agent for agent in here if (agent.host, agent.pid) != own}

    def take_up(self) -> list[int]:
        """Go on from the newest generation of an earlier launcher; return who is there."""
        if self.now.number:
            self._desk.show(self.now)
        self.roster = facts.take_up(self.roster, self.now, time=self._clock.now())
        return [w.worker for w in self.roster.workers.values() if w.spoke and not w.exited]

    def _publish(self, decision: Decision) -> None:
        generation = Generation(
            number=self.now.number + 1,
            members=decision.members,
            cause=decision.cause,
            reason=decision.reason,
            time=time.time(),
            go=decision.go,
            lost=decision.lost,
            dismissed=decision.dismissed,
        )
        add_generation(self._run_dir, generation)  # first: its number is never given again
        self._desk.show(generation)
        self.now = generation
        self.roster = facts.publish(self.roster, generation, time=self._clock.now())
        self._say(f"generation {generation.number}: {generation.reason}")

    def _restart(self) -> None:
        self.roster = restart_all(self.roster, time=self._clock.now())
        self._say(
            "no worker has opened an elastane.Session, so the script restarts on change, as "
            f"under torchrun: all workers start anew (attempt {self.roster.attempt})"
        )

    def _carry_out(self, orders: Sequence[Start | End | Release]) -> None:
        """Give orders; the ids of all workers to start are noted first, and in one go."""
        attempt, last = self.roster.attempt, self.record.worker_ids
        ids = iter(range(last + 1, last + 1 + len(orders)))
        starts = sum(isinstance(order, Start) for order in orders)
        if starts:
            self._keep(worker_ids=last + starts, attempt=attempt)
            self._desk.note_workers(last + starts, attempt=attempt)
        for order in orders:
            self._order(order, worker=next(ids) if isinstance(order, Start) else 0)

    def _order(self, order: Start | End | Release, *, worker: int) -> None:
        self.roster = ordered(self.roster, order, worker=worker, time=self._clock.now())
        match order:
            case Start():
                start = StartWorker(
                    worker=worker,
                    slot=order.slot,
                    expected_workers=order.expected_workers,
                    attempt=self.roster.attempt,
                    rank=order.rank,
                )
                self._desk.order(order.agent, start)
            case End():
                end = EndWorker(worker=order.worker, grace_s=order.grace_s)
                self._desk.order(self.roster.workers[order.worker].agent, end)
            case Release():
                self._desk.order(order.agent, EndAgent())

    def _dismiss(self, number: int) -> None:
        worker = self.roster.workers.get(number)
        if worker is None or worker.exited:
            live = [w.worker for w in self.roster.workers.values() if not w.exited]
            rule, way_out = "no worker of this id lives", f"There are {name_workers(live)}."
            raise ArgumentError(describe("worker", number, rule=rule, way_out=way_out))
        leaving = replace(worker, leaving="scale")
        self.roster = replace(self.roster, workers={**self.roster.workers, number: leaving})

    def _tell_of(self, fact: Exited) -> None:
        worker = self.roster.workers.get(fact.worker)
        expected = worker is None or worker.ended is not None or self.verdict is not None
        if not expected and fact.known and fact.code != 0:
            self._say(f"{exit_sentence(fact.worker, fact.code)}. Last lines of {fact.message}")

    def _count_places(self) -> None:
        places = len(places_of(self.roster, rules=self._rules, time=self._clock.now()))
        if places < self._rules.min_workers:
            self._say(
                f"at least {self._rules.min_workers} workers are wanted and the machines have "
                f"{places} slots: give it more with `elastane run --join {self.record.store}`"
            )

    def _keep(self, **changes: Any) -> None:
        """Note something for a launcher that may have to be started again."""
        record = replace(self.record, **changes)
        if record != self.record:
            self.record = record
            write_launcher(self._run_dir, record)
