"""What a supervisor knows: rules, agents, slots and workers, as plain values.

Pure: knows no torch, no clock, no process and no store. Times are seconds of the keeper's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastane.protocol import Beat

__all__ = [
    "Agent",
    "Roster",
    "Rules",
    "Slot",
    "Worker",
    "is_lost",
    "is_present",
    "live_workers",
    "of_attempt",
    "places_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a job was told to keep to.

    Attributes:
        min_workers: fewer than these do not train.
        max_workers: more than these never take part.
        standby: further workers that are kept ready.
        hang_limit_s: silence, or keeping the others waiting, that counts as a hang.
        join_limit_s: silence while entering a generation that counts as a hang.
        fresh_s: a ready worker that has been silent for longer is not admitted.
        heartbeat_limit_s: silence of an agent after which it counts as lost.
        start_patience_s: how long a first generation waits for the slowest worker.
        hello_patience_s: how long a worker may live without opening a session before the script
            counts as one that opens none, once a worker has died.
        resize_patience_s: the same once the number of places has changed: a session may take its
            time to open.
        broken_patience_s: how long a broken group waits for the death that explains it.
        leave_grace_s: time of a dismissed worker after the others have gone on.
        stop_grace_s: time of all workers to write a checkpoint and leave when the job stops.
        max_respawns: early deaths of a slot in a row, or restarts of the whole, that are borne.
        max_broken: groups broken in a row without a step that are borne.
        max_fruitless: deaths of everybody in a row without a step that are borne.
    """

    min_workers: int = 1
    max_workers: int = 1
    standby: int = 0
    hang_limit_s: float = 60.0
    join_limit_s: float = 5.0
    fresh_s: float = 2.0
    heartbeat_limit_s: float = 3.0
    start_patience_s: float = 30.0
    hello_patience_s: float = 10.0
    resize_patience_s: float = 60.0
    broken_patience_s: float = 0.3
    leave_grace_s: float = 10.0
    stop_grace_s: float = 30.0
    max_respawns: int = 10
    max_broken: int = 5
    max_fruitless: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """What is known of an agent.

    Attributes:
        agent: its id.
        host: its machine's name.
        slots: how many workers it can hold.
        pid: its process id.
        count: its heartbeat when it last changed.
        heard: when that was.
        draining: whether it was asked to end.
        dismissed: whether it was told to end.
    """

    agent: str
    host: str = ""
    slots: int = 0
    pid: int = 0
    count: int = 0
    heard: float = 0.0
    draining: bool = False
    dismissed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What a place for a worker has seen: deaths before membership in a row, free from when."""

    early_deaths: int = 0
    free_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What is known of a worker.

    Attributes:
        worker: its id.
        agent: that runs it.
        slot: its place there.
        host: its machine's name.
        pid: its process id, 0 until it is known.
        rank: given at its start, for scripts without a session.
        attempt: in which it was started.
        started: when it was ordered.
        retry: whether its slot's last worker died early; nobody waits for a retry.
        spoke: whether it opened a session.
        ready: whether it can enter a generation at once.
        done: whether it reached the end of training.
        leaving: why it asked to leave, or was asked to, or "".
        enrolled: newest generation that had it as a member, or 0.
        entered: newest generation that it said it trains in, or 0.
        dismissed: generation that dismissed it, or 0.
        lost: generation that named it as lost, or 0.
        evicted: since when it has been lost though its process may live.
        ended: since when its process has been told to end.
        exited: whether its process ended.
        code: its exit code; `None` if nobody could know it.
        beat: its newest beat.
        heard: when it last said anything new.
        behind: since when it has kept the others waiting.
    """

    worker: int
    agent: str = ""
    slot: int = 0
    host: str = ""
    pid: int = 0
    rank: int = 0
    attempt: int = 0
    started: float = 0.0
    retry: bool = False
    spoke: bool = False
    ready: bool = False
    done: bool = False
    leaving: str = ""
    enrolled: int = 0
    entered: int = 0
    dismissed: int = 0
    lost: int = 0
    evicted: float | None = None
    ended: float | None = None
    exited: bool = False
    code: int | None = None
    beat: Beat = field(default_factory=lambda: Beat(count=0))
    heard: float = 0.0
    behind: float | None = None

    @property
    def left_as_agreed(self) -> bool:
        """Whether it ended with exit code 0 (or an unknown one) after it was done or dismissed."""
        return self.exited and self.code in (0, None) and bool(self.done or self.dismissed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """All that the decisions look at beside the newest generation.

    Attributes:
        workers: by id; those that ended stay until nobody has to be told.
        agents: by id, in the order of their arrival.
        slots: what each (agent, slot) has seen.
        target: how many workers are wanted now.
        stopping: whether the job was asked to stop.
        over: whether a worker reached the end of training.
        spoke: whether any worker of this attempt opened a session.
        attempt: how often the whole was started anew.
        restarts: how many of these followed a death.
        restart_at: when the next attempt may start.
        published: when the newest generation was published.
        settled: when all its members had entered, or `None`.
        broken: generation whose group a member reports broken, since when, and why.
        num_broken: groups broken in a row without a step in between.
        broken_step: `best_step` when the last one was told to meet again.
        best_step: most committed steps ever seen.
        step_at_start: `best_step` at the newest generation that began from nothing.
        divided: since when some members evaluate in the turn in which others train, or `None`.
        fruitless: deaths of everybody in a row without a step.
        failures: sentences on workers that ended badly, newest last.
    """

    workers: Mapping[int, Worker] = field(default_factory=dict)
    agents: Mapping[str, Agent] = field(default_factory=dict)
    slots: Mapping[tuple[str, int], Slot] = field(default_factory=dict)
    target: int = 1
    stopping: bool = False
    over: bool = False
    spoke: bool = False
    attempt: int = 0
    restarts: int = 0
    restart_at: float = 0.0
    published: float = 0.0
    settled: float | None = None
    broken: tuple[int, float, str] | None = None
    num_broken: int = 0
    broken_step: int = -1
    best_step: int = 0
    step_at_start: int = 0
    divided: float | None = None
    fruitless: int = 0
    failures: tuple[str, ...] = ()


def is_lost(agent: Agent | None, *, rules: Rules, time: float) -> bool:
    """Return whether an agent is unknown, or has been silent for too long."""
    return agent is None or time - agent.heard > rules.heartbeat_limit_s


def is_present(roster: Roster, worker: int) -> bool:
    """Return whether a worker's process lives as far as anybody has said."""
    return worker in roster.workers and not roster.workers[worker].exited


def live_workers(roster: Roster, *, rules: Rules, time: float) -> list[Worker]:
    """Return the workers that may live; of a lost agent's nobody can say."""
    return [
        worker
        for worker in roster.workers.values()
        if not worker.exited
        and not is_lost(roster.agents.get(worker.agent), rules=rules, time=time)
    ]


def of_attempt(roster: Roster) -> list[Worker]:
    """Return all workers that were started in the present attempt."""
    return [w for w in roster.workers.values() if w.attempt == roster.attempt]


def places_of(roster: Roster, *, rules: Rules, time: float) -> list[tuple[str, int]]:
    """Return the (agent, slot) pairs of all agents that can be relied on."""
    return [
        (agent.agent, slot)
        for agent in roster.agents.values()
        if not (agent.draining or is_lost(agent, rules=rules, time=time))
        for slot in range(agent.slots)
    ]
