"""Folds what workers and agents say, and what was published, into the roster. Pure.

Knows facts and records; nothing of what is decided about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elastane.membership import exit_sentence
from elastane.protocol import (
    AgentHere,
    Beat,
    Broken,
    Done,
    Draining,
    Entered,
    Exited,
    Generation,
    Hello,
    Leaving,
    Message,
    Ready,
)
from elastane.roster import Agent, Roster, Slot, Worker, is_present

__all__ = ["fold", "forget", "hear_agents", "hear_workers", "publish", "restart_delay_s", "take_up"]

_MAX_DELAY_S = 30.0
_MAX_FAILURES = 20


def fold(roster: Roster, fact: Message, *, now: Generation, time: float) -> Roster:
    """Return the roster after a fact.

    Args:
        roster: what was known.
        fact: what somebody pushed into the inbox.
        now: the newest generation.
        time: seconds.
    """
    match fact:
        case Hello():
            return replace(_hello(roster, fact, time=time), spoke=True)
        case Ready():
            again = {"ready": True, "evicted": None, "entered": 0, "behind": None}
            if fact.worker in now.members and _is_kept(roster, fact.worker):
                return _update(roster, fact.worker, heard=time)
            return _update(roster, fact.worker, heard=time, **again)
        case Entered():
            return _entered(roster, fact, now=now, time=time)
        case Broken():
            return _broken(roster, fact, now=now, time=time)
        case Leaving():
            return _update(roster, fact.worker, heard=time, leaving=fact.why or "leaving")
        case Done():
            ended = _update(roster, fact.worker, heard=time, done=True)
            return replace(ended, over=True, best_step=max(roster.best_step, fact.step))
        case AgentHere():
            return _agent_here(roster, fact, time=time)
        case Draining():
            agent = roster.agents.get(fact.agent)
            return roster if agent is None else _with_agent(roster, replace(agent, draining=True))
        case Exited():
            return _exited(roster, fact, now=now, time=time)
    return roster


def hear_workers(roster: Roster, beats: Mapping[int, Beat], *, time: float) -> Roster:
    """Return the roster after the newest beats; who waits for whom is told by `arrived`."""
    heard = {w: beat for w, beat in beats.items() if is_present(roster, w)}
    if not heard:
        return roster
    newest = max(beat.generation for beat in heard.values())
    furthest = max(beat.arrived for beat in heard.values() if beat.generation == newest)
    workers = dict(roster.workers)
    for number, beat in heard.items():
        worker = workers[number]
        late = beat.generation == newest > 0 and beat.arrived < furthest and not beat.paused
        moved = beat.arrived != worker.beat.arrived or worker.behind is None
        behind = (time if moved else worker.behind) if late else None
        if behind == worker.behind and beat == worker.beat:
            continue
        last = time if beat.count != worker.beat.count else worker.heard
        workers[number] = replace(worker, beat=beat, heard=last, behind=behind)
    best = max(roster.best_step, *(beat.step for beat in heard.values()))
    together = [b.doing for b in heard.values() if (b.generation, b.arrived) == (newest, furthest)]
    whole = newest > 0 and len(together) == sum(b.generation == newest for b in heard.values())
    divided = None
    if whole and len(set(together)) > 1:
        divided = time if roster.divided is None else roster.divided
    return replace(roster, workers=workers, best_step=best, divided=divided)


def hear_agents(roster: Roster, counts: Mapping[str, int], *, time: float) -> Roster:
    """Return the roster after the newest heartbeats."""
    agents = dict(roster.agents)
    for name, count in counts.items():
        if name in agents and agents[name].count != count:
            agents[name] = replace(agents[name], count=count, heard=time)
    return replace(roster, agents=agents)


def publish(roster: Roster, generation: Generation, *, time: float) -> Roster:
    """Return the roster after a generation was published."""
    workers = dict(roster.workers)
    for number in generation.members:
        if number in workers:
            workers[number] = replace(workers[number], enrolled=generation.number, behind=None)
    for number in generation.dismissed:
        if number in workers:
            workers[number] = replace(workers[number], dismissed=generation.number)
    for number in generation.lost:
        if number in workers:
            evicted = None if workers[number].exited else time
            lost = {"lost": generation.number, "ready": False, "evicted": evicted}
            workers[number] = replace(workers[number], **lost)
    changed: dict[str, Any] = {"workers": workers, "published": time, "broken": None}
    changed["settled"] = None if generation.members else time
    if generation.cause == "broken":
        again = roster.best_step <= roster.broken_step
        changed["num_broken"] = roster.num_broken + 1 if again else 1
        changed["broken_step"] = roster.best_step
    if generation.cause == "start":
        since_start = roster.best_step > roster.step_at_start or not generation.lost
        changed["fruitless"] = 0 if since_start else roster.fruitless + 1
        changed["step_at_start"] = roster.best_step
    return replace(roster, **changed)


def take_up(roster: Roster, generation: Generation, *, time: float) -> Roster:
    """Return the roster of a launcher that found this generation from before."""
    workers = roster.workers
    present = [workers[w] for w in generation.members if is_present(roster, w)]
    settled = all(worker.entered >= generation.number for worker in present)
    best = max((worker.beat.step for worker in present), default=0)
    return replace(
        roster,
        published=time,
        settled=time if settled else None,
        best_step=max(roster.best_step, best),
    )


def forget(roster: Roster, *, now: Generation) -> Roster:
    """Return the roster without ended workers of whom everybody has heard."""
    if roster.settled is None or roster.over or not roster.spoke:
        return roster
    ended = {number for number, worker in roster.workers.items() if worker.exited}
    heard_of = ended.difference(now.members)
    if not heard_of:
        return roster
    kept = {n: worker for n, worker in roster.workers.items() if n not in heard_of}
    return replace(roster, workers=kept)


def restart_delay_s(deaths: int) -> float:
    """Return how long to wait before the next try after so many early deaths in a row.

    Example:
        >>> [restart_delay_s(deaths) for deaths in (0, 1, 2, 3, 20)]
        [0.0, 0.5, 1.0, 2.0, 30.0]
    """
    return min(0.5 * 2 ** (min(deaths, 10) - 1), _MAX_DELAY_S) if deaths else 0.0


def _update(roster: Roster, worker: int, **changes: Any) -> Roster:
    if worker not in roster.workers:
        return roster
    changed = replace(roster.workers[worker], **changes)
    return replace(roster, workers={**roster.workers, worker: changed})


def _is_kept(roster: Roster, worker: int) -> bool:
    return worker in roster.workers and roster.workers[worker].evicted is None


def _with_agent(roster: Roster, agent: Agent) -> Roster:
    return replace(roster, agents={**roster.agents, agent.agent: agent})


def _hello(roster: Roster, fact: Hello, *, time: float) -> Roster:
    known = roster.workers.get(fact.worker, Worker(worker=fact.worker, started=time))
    record = Generation.from_mapping(fact.generation)
    inside = record.number if fact.worker in record.members else 0
    worker = replace(
        known,
        agent=fact.agent,
        slot=fact.slot,
        host=fact.host,
        pid=fact.pid,
        attempt=roster.attempt,
        spoke=True,
        exited=False,
        code=None,
        heard=time,
        enrolled=max(known.enrolled, inside),
        entered=max(known.entered, inside),
    )
    return replace(roster, workers={**roster.workers, fact.worker: worker})


def _entered(roster: Roster, fact: Entered, *, now: Generation, time: float) -> Roster:
    changed = _update(roster, fact.worker, heard=time, entered=fact.generation)
    settled = roster.settled
    if settled is None and _all_entered(changed, now):
        settled = time
    return replace(changed, settled=settled, best_step=max(roster.best_step, fact.step))


def _all_entered(roster: Roster, now: Generation) -> bool:
    """Return whether all live members have entered, and there is one."""
    workers = roster.workers
    waited_for = any(
        w in workers and not workers[w].exited and workers[w].entered < now.number
        for w in now.members
    )
    return not waited_for and any(is_present(roster, w) for w in now.members)


def _broken(roster: Roster, fact: Broken, *, now: Generation, time: float) -> Roster:
    changed = _update(roster, fact.worker, heard=time)
    if fact.generation != now.number or roster.broken is not None:
        return changed
    return replace(changed, broken=(fact.generation, time, fact.why))


def _agent_here(roster: Roster, fact: AgentHere, *, time: float) -> Roster:
    agent = Agent(agent=fact.agent, host=fact.host, slots=fact.slots, pid=fact.pid, heard=time)
    changed = _with_agent(roster, agent)
    live = {number: int(slot) for slot, number in fact.workers.items()}
    workers = dict(changed.workers)
    for number, slot in live.items():
        place = {"agent": fact.agent, "slot": slot, "host": fact.host}
        new = Worker(worker=number, attempt=roster.attempt, started=time, heard=time)
        workers[number] = replace(workers.get(number, new), **place)
    for number, worker in workers.items():
        if worker.agent == fact.agent and number not in live:
            workers[number] = replace(worker, exited=True, code=None)
    return replace(changed, workers=workers)


def _exited(roster: Roster, fact: Exited, *, now: Generation, time: float) -> Roster:
    worker = roster.workers.get(fact.worker)
    if worker is None or worker.exited:
        return roster
    code = fact.code if fact.known else None
    roster = _update(roster, fact.worker, exited=True, code=code)
    unbidden = not (worker.dismissed or worker.leaving or worker.ended is not None)
    if code == 0 and unbidden and worker.worker in now.members:
        return replace(roster, over=True)
    if worker.ended is not None or roster.workers[fact.worker].left_as_agreed:
        return roster
    if roster.stopping:
        return roster
    failure = exit_sentence(fact.worker, code) + (f"\n{fact.message}" if fact.message else "")
    slot = _slot_after(roster, worker, time=time)
    return replace(
        roster,
        slots={**roster.slots, (worker.agent, worker.slot): slot},
        failures=(*roster.failures, failure)[-_MAX_FAILURES:],
    )


def _slot_after(roster: Roster, worker: Worker, *, time: float) -> Slot:
    """Return what a slot has seen after an unwanted end: early deaths cost patience."""
    if worker.enrolled:
        return Slot(free_at=time)
    before = roster.slots.get((worker.agent, worker.slot), Slot())
    deaths = before.early_deaths + 1
    return Slot(early_deaths=deaths, free_at=time + restart_delay_s(deaths))
