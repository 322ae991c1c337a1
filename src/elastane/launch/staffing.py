"""Which workers to start and to end, and which agents to let go. Pure.

Knows the roster and the rules; nothing of processes or stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from elastane.protocol import Generation
from elastane.roster import Roster, Rules, Slot, Worker, live_workers, of_attempt, places_of

__all__ = ["End", "Release", "Start", "ordered", "staff"]

_END_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a worker in a slot of an agent. See `StartWorker`."""

    agent: str
    slot: int
    rank: int
    expected_workers: int
    retry: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """End a worker's processes within a grace."""

    worker: int
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Have an agent end that asked to, and whose workers have left."""

    agent: str


def staff(
    now: Generation, roster: Roster, *, rules: Rules, time: float
) -> list[Start | End | Release]:
    """Return the workers to end and to start now, and the agents to let go."""
    ends = _ends(now, roster, rules=rules, time=time)
    ended = {end.worker for end in ends}
    starts = _starts(roster, ended=ended, rules=rules, time=time)
    return [*ends, *starts, *_releases(roster)]


def ordered(roster: Roster, order: Start | End | Release, *, worker: int, time: float) -> Roster:
    """Return the roster after an order went out; `worker` is the id of one that starts."""
    match order:
        case Start():
            agent = roster.agents[order.agent]
            new = Worker(
                worker=worker,
                agent=order.agent,
                slot=order.slot,
                host=agent.host,
                rank=order.rank,
                attempt=roster.attempt,
                started=time,
                heard=time,
                retry=order.retry,
            )
            return replace(roster, workers={**roster.workers, worker: new})
        case End():
            ending = replace(roster.workers[order.worker], ended=time)
            return replace(roster, workers={**roster.workers, order.worker: ending})
        case Release():
            released = replace(roster.agents[order.agent], dismissed=True)
            return replace(roster, agents={**roster.agents, order.agent: released})


def _ends(now: Generation, roster: Roster, *, rules: Rules, time: float) -> list[End]:
    live = [w for w in roster.workers.values() if not w.exited and w.ended is None]
    members = frozenset(now.members)
    ends = {}
    for worker in live:
        is_member = worker.worker in members
        grace_s = _reason_to_end(
            worker, is_member=is_member, now=now, roster=roster, rules=rules, time=time
        )
        if grace_s is not None:
            ends[worker.worker] = grace_s
    employed = [w for w in live if w.worker not in ends and _is_employed(w, roster)]
    spare = [w for w in employed if w.worker not in members]
    surplus = max(len(employed) - roster.target - rules.standby, 0) if roster.spoke else 0
    for worker in sorted(spare, key=lambda w: (w.evicted is None, -w.worker))[:surplus]:
        ends[worker.worker] = _END_GRACE_S
    return [End(worker=number, grace_s=grace_s) for number, grace_s in ends.items()]


def _reason_to_end(
    worker: Worker,
    *,
    is_member: bool,
    now: Generation,
    roster: Roster,
    rules: Rules,
    time: float,
) -> float | None:
    """Return the grace with which a worker is to be ended, or `None`."""
    settled = time if roster.settled is None else roster.settled
    alone = not now.members
    grace_s = rules.stop_grace_s if alone else rules.leave_grace_s
    agent = roster.agents.get(worker.agent)
    if worker.attempt < roster.attempt:
        return _END_GRACE_S
    if roster.stopping and not worker.dismissed and now.cause == "stop":
        return _END_GRACE_S if roster.spoke else rules.stop_grace_s
    if worker.dismissed and not is_member:
        return _END_GRACE_S if time - settled > grace_s else None
    silent = worker.spoke and not worker.done  # after its session a script may take its time
    if silent and time - worker.heard > 2 * rules.hang_limit_s:
        return 0.0
    if worker.evicted is not None and time - worker.evicted > rules.hang_limit_s:
        return 0.0
    unwanted = roster.over or worker.leaving or (agent is not None and agent.draining)
    return _END_GRACE_S if unwanted and not is_member and not worker.done else None


def _is_employed(worker: Worker, roster: Roster) -> bool:
    """Return whether a worker takes part or will, as far as anybody can say."""
    agent = roster.agents.get(worker.agent)
    unfit = worker.exited or worker.leaving or worker.dismissed or worker.ended is not None
    return not unfit and agent is not None and not agent.draining


def _starts(roster: Roster, *, ended: set[int], rules: Rules, time: float) -> Iterator[Start]:
    live = live_workers(roster, rules=rules, time=time)
    if roster.stopping or roster.over or time < roster.restart_at:
        return
    if any(w.attempt < roster.attempt for w in live):
        return
    if of_attempt(roster) and not roster.spoke:
        return  # a script without a session has one number of workers for a whole attempt
    employed = [w for w in live if w.worker not in ended and _is_employed(w, roster)]
    missing = roster.target + rules.standby - len(employed)
    taken = {(w.agent, w.slot) for w in live}
    ranks = iter(sorted(set(range(len(roster.workers) + missing)) - {w.rank for w in employed}))
    places = [p for p in places_of(roster, rules=rules, time=time) if p not in taken]
    free = [p for p in places if roster.slots.get(p, Slot()).free_at <= time][: max(missing, 0)]
    world = min(len(employed) + len(free), rules.max_workers)
    for agent, slot in free:
        retry = roster.slots.get((agent, slot), Slot()).early_deaths > 0
        yield Start(agent=agent, slot=slot, rank=next(ranks), expected_workers=world, retry=retry)


def _releases(roster: Roster) -> Iterator[Release]:
    busy = {w.agent for w in roster.workers.values() if not w.exited}
    for agent in roster.agents.values():
        if agent.draining and not agent.dismissed and agent.agent not in busy:
            yield Release(agent=agent.agent)
