"""When a job is over or hopeless, and when all its workers must start anew. Pure.

Knows the roster and the rules; nothing of processes or stores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastane.launch.facts import restart_delay_s
from elastane.membership import name_workers
from elastane.protocol import Generation
from elastane.roster import Roster, Rules, is_present, live_workers, of_attempt, places_of

__all__ = ["Verdict", "judge", "may_restart", "restart_all"]

_QUICK_DEATH_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the job ended: exit code, state and a sentence."""

    code: int
    state: str
    reason: str


def may_restart(roster: Roster, *, rules: Rules, time: float) -> bool:
    """Return whether all must start anew, as under torchrun: a script that opens no session.

    That is so when a worker died, or the number of places changed, before any worker of this
    attempt opened a session, and they had the time to.
    """
    attempt = of_attempt(roster)
    if roster.spoke or roster.stopping or not attempt:
        return False
    live = [w for w in attempt if not w.exited]
    died = any(w.exited and w.code != 0 for w in attempt)
    patience_s = rules.hello_patience_s if died else rules.resize_patience_s
    patient = any(time - w.started < patience_s for w in live)
    places = len(places_of(roster, rules=rules, time=time))
    resized = bool(live) and min(roster.target + rules.standby, places) != len(attempt)
    return not patient and (died or resized)


def restart_all(roster: Roster, *, time: float) -> Roster:
    """Return the roster of the next attempt: whoever still lives is to be ended."""
    attempt = of_attempt(roster)
    died = any(w.exited and w.code != 0 for w in attempt)
    quick = died and time - min(w.started for w in attempt) < _QUICK_DEATH_S
    restarts = roster.restarts + 1 if died else roster.restarts
    return replace(
        roster,
        attempt=roster.attempt + 1,
        restarts=restarts,
        restart_at=time + (restart_delay_s(restarts) if quick else 0.0),
        slots={},
    )


def judge(now: Generation, roster: Roster, *, rules: Rules, time: float) -> Verdict | None:
    """Return how the job ended, or `None` while it goes on."""
    live = live_workers(roster, rules=rules, time=time)
    if roster.stopping:
        if live:
            return None
        return Verdict(code=0, state="stopped", reason="stopped as asked")
    if roster.over:
        return None if live else _finish(roster)
    hopeless = _hopeless(now, roster, rules=rules, time=time)
    if hopeless is None:
        return _sessionless_end(roster)
    last = f". The last one: {roster.failures[-1]}" if roster.failures else ""
    return Verdict(code=1, state="failed", reason=hopeless + last)


def _finish(roster: Roster) -> Verdict:
    late = [w for w in roster.workers.values() if w.done and w.code not in (0, None)]
    if late:
        codes = ", ".join(f"worker {w.worker}: {w.code}" for w in late)
        reason = f"training reached its end, but not all workers ended well ({codes})"
        return Verdict(code=1, state="failed", reason=reason)
    return Verdict(code=0, state="finished", reason="training reached its end")


def _hopeless(now: Generation, roster: Roster, *, rules: Rules, time: float) -> str | None:
    """Return why the job is given up, or `None`."""
    nobody = now.members and all(not is_present(roster, w) for w in now.members)
    stuck = nobody and roster.best_step <= roster.step_at_start
    worst = max((slot.early_deaths for slot in roster.slots.values()), default=0)
    if worst > rules.max_respawns:
        return f"{worst} workers in a row died in one slot before they could train"
    if roster.restarts >= rules.max_respawns and may_restart(roster, rules=rules, time=time):
        return f"all workers were started anew {roster.restarts} times and died again"
    if stuck and roster.fruitless + 1 >= rules.max_fruitless:
        return f"all workers died {rules.max_fruitless} times without a step in between"
    if roster.divided is not None and time - roster.divided > rules.hang_limit_s:
        return _division(roster)
    if roster.num_broken >= rules.max_broken:
        return f"the process group broke {roster.num_broken} times in a row without a step"
    return None


def _division(roster: Roster) -> str:
    doing: dict[str, list[int]] = {}
    for worker in roster.workers.values():
        if worker.entered and not worker.exited:
            doing.setdefault(worker.beat.doing, []).append(worker.worker)
    groups = " while ".join(f"{name_workers(who)}: {what}" for what, who in doing.items())
    return (
        f"the workers wait for each other in different places ({groups}): all must call "
        "session.evaluate at the same step, so decide on it by the step's result alone "
        "(`if result.crossed(100):`), not by a counter or a clock of the script's own, which "
        "differ on a worker that has joined"
    )


def _sessionless_end(roster: Roster) -> Verdict | None:
    attempt = of_attempt(roster)
    if roster.spoke or not attempt or any(not w.exited or w.code != 0 for w in attempt):
        return None
    return Verdict(code=0, state="finished", reason="the script ended on all workers")
