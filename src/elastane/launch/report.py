"""What `elastane status` shows of a job, out of what the coordinator knows. Pure."""

from __future__ import annotations

from typing import Any

from elastane.launch.verdict import Verdict
from elastane.protocol import Generation
from elastane.roster import Roster, Rules, Worker

__all__ = ["report"]

_NUMBERS = (
    *("progress", "num_steps", "lr", "gain", "single_share", "batch"),
    "samples_per_s",
)


def report(
    now: Generation, roster: Roster, *, rules: Rules, verdict: Verdict | None, time: float
) -> dict[str, Any]:
    """Return the state of a job as plain values; `None` where nothing is known."""
    first = roster.workers.get(now.members[0]) if now.members else None
    numbers = {} if first is None else first.beat.status
    ranks = {worker: rank for rank, worker in enumerate(now.members)}
    return {
        "state": _state(now, roster, rules=rules, verdict=verdict, time=time),
        "generation": now.number,
        "cause": now.cause,
        "reason": now.reason if verdict is None else verdict.reason,
        "min_workers": rules.min_workers,
        "max_workers": rules.max_workers,
        "target": roster.target,
        "workers": [
            _row(w, rank=ranks.get(w.worker), now=now)
            for w in roster.workers.values()
            if not w.exited
        ],
        "step": None if first is None else first.beat.step,
        **{name: numbers.get(name) for name in _NUMBERS},
        "last_change": _last_change(now, roster),
    }


def _state(
    now: Generation, roster: Roster, *, rules: Rules, verdict: Verdict | None, time: float
) -> str:
    if verdict is not None:
        return verdict.state
    if roster.stopping:
        return "stopping"
    if now.members and any(w in roster.workers for w in now.members):
        return "running" if now.go else "holding"
    live = [w for w in roster.workers.values() if not w.exited]
    alone = live and all(time - w.started > rules.hello_patience_s for w in live)
    return "running" if alone and not roster.spoke else "starting"


def _row(worker: Worker, *, rank: int | None, now: Generation) -> dict[str, Any]:
    is_member = rank is not None
    return {
        "worker": worker.worker,
        "agent": worker.agent,
        "host": worker.host,
        "slot": worker.slot,
        "pid": worker.pid or None,
        "rank": rank,
        "state": _worker_state(worker, is_member=is_member, now=now),
        "step": worker.beat.step if is_member else None,
    }


def _worker_state(worker: Worker, *, is_member: bool, now: Generation) -> str:
    if worker.done:
        return "done"
    if is_member:
        return "training" if worker.entered >= now.number else "entering"
    if worker.dismissed or worker.leaving or worker.ended is not None:
        return "leaving"
    if worker.evicted is not None:
        return "lost"
    return "standby" if worker.ready else "starting"


def _last_change(now: Generation, roster: Roster) -> dict[str, Any] | None:
    if not now.number:
        return None
    settled = roster.settled
    return {
        "generation": now.number,
        "cause": now.cause,
        "reason": now.reason,
        "time": now.time,
        "pause_s": None if settled is None else settled - roster.published,
    }
