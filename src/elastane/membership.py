"""Who takes part next: the one decision about members, and its reason. Pure.

Knows what was seen of agents and workers (`elastane.roster`); no torch, clock, process or store.
Times are arguments, in seconds of the clock that the roster's times are of.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastane.protocol import Generation
from elastane.roster import Roster, Rules, Worker, is_lost, is_present

__all__ = ["Decision", "decide", "exit_sentence", "name_workers"]

Why = tuple[str, str]  # cause, sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A generation to publish, but for its number and time. See `elastane.protocol.Generation`."""

    members: tuple[int, ...]
    cause: str
    reason: str
    go: bool = True
    lost: tuple[int, ...] = ()
    dismissed: tuple[int, ...] = ()


def decide(now: Generation, roster: Roster, *, rules: Rules, time: float) -> Decision | None:
    """Return what should follow the newest generation, or `None` if it should stand.

    Args:
        now: the newest generation.
        roster: what is known of agents and workers.
        rules: what the job was told to keep to.
        time: seconds.

    Returns:
        The choice and its reason.

    Example:
        >>> from elastane.roster import Agent
        >>> agents = {"here": Agent(agent="here")}
        >>> ready = {i: Worker(worker=i, agent="here", ready=True) for i in (1, 2)}
        >>> roster = Roster(agents=agents, workers=ready, target=2)
        >>> decide(Generation(), roster, rules=Rules(max_workers=2), time=0.0).reason
        'workers 1 and 2 start'
    """
    if roster.stopping:
        return _stop(now, roster)
    losses = _losses(now, roster, rules=rules, time=time)
    present = tuple(w for w in now.members if w not in losses and is_present(roster, w))
    if roster.over:
        return _wind_up(now, roster, losses=losses, present=present, rules=rules, time=time)
    ready = _candidates(now, roster, rules=rules, time=time)
    if not present:
        return _start(now, roster, losses=losses, ready=ready, rules=rules, time=time)
    leavers = _leavers(roster, present)
    staying = tuple(w for w in present if w not in leavers)
    room = roster.target - len(staying)
    if leavers and not any(roster.workers[w].entered for w in staying):
        if not staying and not (ready and len(present) < rules.max_workers):
            return _leave_all(present, losses=losses, leavers=leavers)
        # Only the leavers hold the state: they stay until somebody has copied it.
        room = min(max(roster.target - len(present), 1 - len(staying)), len(ready))
        staying, leavers = present, {}
    joining = tuple(ready[: max(room, 0)])
    if now.go and roster.settled is None and not (losses or leavers):
        joining = ()  # a newer generation would end the entering of this one
    change = _change(staying, joining, now=now, losses=losses, leavers=leavers, rules=rules)
    return change or _mend(now, staying, roster, rules=rules, time=time)


def exit_sentence(worker: int, code: int | None) -> str:
    """Return a sentence on how a worker ended.

    Example:
        >>> exit_sentence(3, -9)
        'worker 3 was killed by SIGKILL'
    """
    if code is None:
        return f"worker {worker} ended while no launcher watched it"
    if code < 0:
        known = {int(one): one.name for one in signal.Signals}
        return f"worker {worker} was killed by {known.get(-code, f'signal {-code}')}"
    return f"worker {worker} exited with code {code}"


def name_workers(workers: Collection[int]) -> str:
    """Return workers in words.

    Example:
        >>> name_workers([4, 5, 7])
        'workers 4, 5 and 7'
    """
    names = [str(one) for one in workers]
    if len(names) == 1:
        return f"worker {names[0]}"
    return f"workers {', '.join(names[:-1])} and {names[-1]}" if names else "no worker"


def _stop(now: Generation, roster: Roster) -> Decision | None:
    if now.cause == "stop":
        return None
    leaving = tuple(w.worker for w in roster.workers.values() if w.spoke and not w.exited)
    reason = "the job was asked to stop: workers write a checkpoint and leave"
    return Decision(members=(), cause="stop", reason=reason, dismissed=leaving)


def _losses(now: Generation, roster: Roster, *, rules: Rules, time: float) -> dict[int, Why]:
    """Return who is gone without having agreed to it and has not been named so.

    A former member counts as long as a member is still to enter: it may wait for it. Who has not
    come to a meeting is gone only if nobody else is: it may have to wait for whoever hangs.
    """
    entered = [roster.workers[w].entered for w in now.members if is_present(roster, w)]
    unsettled = any(number < now.number for number in entered)
    former = [w.worker for w in roster.workers.values() if unsettled and w.lost <= w.enrolled > 0]
    losses = {}
    for number in dict.fromkeys((*now.members, *former)):
        why = _loss(number, now=now, roster=roster, rules=rules, time=time)
        if why is not None:
            losses[number] = why
    return losses or _absent(now, roster, rules=rules, time=time)


def _absent(now: Generation, roster: Roster, *, rules: Rules, time: float) -> dict[int, Why]:
    """Return the members for whom others have waited too long at the generation's meeting.

    Newcomers come as soon as they are let in; a member that comes has left the group before, and
    then all others could have done so.
    """
    waited_s = time - roster.published
    members = [roster.workers[w] for w in now.members if is_present(roster, w)]
    if waited_s <= rules.hang_limit_s:
        return {}
    any_entered = any(w.entered == now.number for w in members)
    any_came = any(w.beat.met == now.number for w in members if w.entered)
    late = [w for w in members if w.entered < now.number and not (w.beat.paused or w.done)]
    absent = [w for w in late if any_entered or (any_came and w.beat.met < now.number)]
    why = f"has not met the others for {waited_s:.1f} s"
    return {w.worker: ("hang", f"worker {w.worker} {why}") for w in absent}


def _loss(number: int, *, now: Generation, roster: Roster, rules: Rules, time: float) -> Why | None:
    worker = roster.workers.get(number)
    if worker is None:
        return "lost", f"worker {number} did not come back"
    if worker.done or worker.left_as_agreed:
        return None
    if worker.exited:
        return "leave" if worker.code == 0 else "death", exit_sentence(number, worker.code)
    if is_lost(roster.agents.get(worker.agent), rules=rules, time=time):
        return "lost", f"agent {worker.agent} of worker {number} is silent"
    return _hang(worker, now=now, rules=rules, time=time)


def _hang(worker: Worker, *, now: Generation, rules: Rules, time: float) -> Why | None:
    entering = worker.entered < now.number
    limit = min(rules.hang_limit_s, rules.join_limit_s) if entering else rules.hang_limit_s
    silent_s = time - worker.heard
    if silent_s > limit:
        return "hang", f"worker {worker.worker} has been silent for {silent_s:.1f} s"
    late_s = 0.0 if worker.behind is None or entering or not now.go else time - worker.behind
    if late_s > rules.hang_limit_s:
        return "hang", f"worker {worker.worker} has kept the others waiting for {late_s:.1f} s"
    return None


def _candidates(now: Generation, roster: Roster, *, rules: Rules, time: float) -> Sequence[int]:
    """Return who can enter at once, oldest first."""
    members = frozenset(now.members)
    fit = [
        w.worker
        for w in roster.workers.values()
        if w.ready
        and w.worker not in members
        and not (w.exited or w.leaving or w.dismissed or w.done or w.ended is not None)
        and time - w.heard <= rules.fresh_s
        and _is_open(roster, w.agent, rules=rules, time=time)
    ]
    return sorted(fit)


def _is_open(roster: Roster, agent: str, *, rules: Rules, time: float) -> bool:
    """Return whether an agent's workers may take part."""
    known = roster.agents.get(agent)
    return known is not None and not (known.draining or is_lost(known, rules=rules, time=time))


def _leavers(roster: Roster, present: Sequence[int]) -> dict[int, Why]:
    """Return which members leave as agreed: those who ask, then the newest above the target."""
    leavers: dict[int, Why] = {}
    for worker in (roster.workers[w] for w in present):
        if worker.leaving:
            cause = "scale" if worker.leaving == "scale" else "leave"
            why = "was named" if cause == "scale" else f"asked to leave: {worker.leaving}"
            leavers[worker.worker] = cause, f"worker {worker.worker} {why}"
        elif worker.agent in roster.agents and roster.agents[worker.agent].draining:
            leavers[worker.worker] = "leave", f"agent {worker.agent} is to end"
    staying = sorted(w for w in present if w not in leavers)
    for number in reversed(staying[roster.target :]):
        leavers[number] = "scale", f"{_count(roster.target)} wanted"
    return leavers


def _start(
    now: Generation,
    roster: Roster,
    *,
    losses: Mapping[int, Why],
    ready: Sequence[int],
    rules: Rules,
    time: float,
) -> Decision | None:
    """Begin with whoever is ready once nobody is worth waiting for. They hold no state yet."""
    live = [w for w in roster.workers.values() if not w.exited]
    if len(ready) < rules.min_workers or any(w.dismissed == now.number > 0 for w in live):
        return None
    waited_for = [
        w
        for w in live
        if not (w.ready or w.retry or w.leaving or w.ended is not None or w.evicted is not None)
    ]
    begun = min(roster.workers[w].started for w in ready)
    if waited_for and len(ready) < roster.target and time - begun < rules.start_patience_s:
        return None
    members = tuple(ready[: roster.target])
    after = f" after {next(iter(losses.values()))[1]} and nobody was left" if losses else ""
    reason = f"{name_workers(members)} start{'s' if len(members) == 1 else ''}{after}"
    return Decision(members=members, cause="start", reason=reason, lost=tuple(losses))


def _leave_all(
    present: tuple[int, ...], *, losses: Mapping[int, Why], leavers: Mapping[int, Why]
) -> Decision:
    cause, why = next(iter(leavers.values()))
    reason = f"{why}; nobody stays, so they write a checkpoint"
    return Decision(members=(), cause=cause, reason=reason, lost=tuple(losses), dismissed=present)


def _change(
    staying: tuple[int, ...],
    joining: tuple[int, ...],
    *,
    now: Generation,
    losses: Mapping[int, Why],
    leavers: Mapping[int, Why],
    rules: Rules,
) -> Decision | None:
    gone = {**losses, **leavers}
    enough = len(staying) + len(joining) >= rules.min_workers
    if not gone and not (enough and (joining or not now.go)):
        return None
    members = staying + joining if enough else staying
    causes = [cause for cause, _ in gone.values()]
    reasons = list(dict.fromkeys(why for _, why in gone.values()))
    if joining and enough:
        causes.append("join")
        reasons.append(f"{name_workers(joining)} join{'s' if len(joining) == 1 else ''}")
    if not enough:
        causes.insert(0, "hold")
        reasons.append(f"wait for at least {_count(rules.min_workers)}")
    reasons.append(f"{_count(len(members))} now")
    return Decision(
        members=members,
        cause=causes[0] if causes else "join",
        reason="; ".join(reasons),
        go=enough,
        lost=tuple(losses),
        dismissed=tuple(leavers),
    )


def _mend(
    now: Generation, members: tuple[int, ...], roster: Roster, *, rules: Rules, time: float
) -> Decision | None:
    """Have the same members meet again if their group broke and no death explains it.

    If that was of no use, newcomers that never managed to enter are left out.
    """
    why = _breakage(now, members, roster, rules=rules, time=time)
    if why is None:
        return None
    old = tuple(w for w in members if roster.workers[w].entered)
    again = roster.num_broken > 0 and roster.best_step <= roster.broken_step
    new = tuple(w for w in members if w not in old) if old and again else ()
    reason = f"the group broke though nobody is gone ({why}): all meet again"
    if new:
        reason += f", but for {name_workers(new)}"
    kept = tuple(w for w in members if w not in new)
    return Decision(members=kept, cause="broken", reason=reason, go=now.go, lost=new)


def _breakage(
    now: Generation, members: tuple[int, ...], roster: Roster, *, rules: Rules, time: float
) -> str | None:
    """Return why the newest generation is taken for broken, or `None`."""
    if roster.broken is not None and roster.broken[0] == now.number and members:
        _, since, why = roster.broken
        return why if time - since >= rules.broken_patience_s else None
    nobody = now.go and not any(roster.workers[w].entered == now.number for w in members)
    paused = any(roster.workers[w].beat.paused for w in members)
    if members and nobody and not paused and time - roster.published > rules.hang_limit_s:
        return f"nobody has entered it for {rules.hang_limit_s:g} s"
    return None


def _wind_up(
    now: Generation,
    roster: Roster,
    *,
    losses: Mapping[int, Why],
    present: Sequence[int],
    rules: Rules,
    time: float,
) -> Decision | None:
    """After the end of training: only who has not reached it may have to meet again."""
    late = tuple(w for w in present if not roster.workers[w].done)
    done = tuple(w for w in present if roster.workers[w].done)
    if not late:
        return None
    if not losses:
        return _mend(now, late, roster, rules=rules, time=time)
    cause, why = next(iter(losses.values()))
    return Decision(members=late, cause=cause, reason=why, lost=tuple(losses), dismissed=done)


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"
