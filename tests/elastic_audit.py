"""What must hold of any elastic run, checked against the records that its workers wrote.

A step counts unless a later generation opened before its end: then it is void, and made again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from supervisor import Record, Supervisor

from elastane.order import stream_indices
from elastane.telemetry import read_events

OWN = {"kind", "worker", "process", "time", "skipped", "statistics"}
TOLD = "generation", "progress", "position", "lr", "gain", "world_size"


def audit(supervisor: Supervisor, *, num_samples: int = 301, seed: int = 3) -> list[Record]:
    """Check a run's data, digests and members; return its committed steps in order.

    Each position is committed once and in order; the members of a step took exactly the order's
    samples between them; and all who open a group stand at one position in one state.
    """
    openings = supervisor.all_records("generation")
    for place in _grouped(openings, "generation", "world_size").values():
        assert len({(one["position"], one["digest"]) for one in place}) == 1, place
    lines = [line for line in supervisor.all_records("step") if not line["skipped"]]
    committed = _committed(lines, openings)
    _check_samples(committed, supervisor.all_records("dealt"), num_samples=num_samples, seed=seed)
    _check_ends(supervisor.all_records("end"), committed)
    return committed


def foreign(supervisor: Supervisor) -> list[Record]:
    """Return the steps that workers were told of and were no members of the group for."""
    members = {one.number: one.members for one in supervisor.generations}
    steps = supervisor.all_records("step")
    return [one for one in steps if one["worker"] not in members[one["generation"]]]


def discarded(supervisor: Supervisor) -> list[Record]:
    """Return what workers took for steps that were not committed then."""
    steps = {(line["generation"], line["start"]) for line in supervisor.all_records("step")}
    dealt = supervisor.all_records("dealt")
    return [one for one in dealt if (one["generation"], one["start"]) not in steps]


def check_events(supervisor: Supervisor, committed: Iterable[Record]) -> None:
    """Check that each committed step was told, as it was, and no other.

    Args:
        supervisor: knows the run's folder.
        committed: returned by `audit`.
    """
    events = [e for e in read_events(supervisor.folder / "run") if e["event"] == "step"]
    told = [event for event in events if not event["skipped"]]
    steps = {line["step"]: line for line in committed}
    numbers = {event["step"] for event in told}
    assert numbers <= set(steps)
    assert not set(steps) - numbers, "steps that nobody told"
    for event in told:
        line = steps[event["step"]]
        assert {name: event[name] for name in TOLD} == {name: line[name] for name in TOLD}


def _grouped(records: Iterable[Record], *names: str) -> dict[tuple[object, ...], list[Record]]:
    groups: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(record[name] for name in names)].append(record)
    return groups


def _committed(lines: Iterable[Record], openings: Iterable[Record]) -> list[Record]:
    """Return one line for each step that counts; all workers must have the same."""
    opened = [(one["generation"], one["position"]) for one in openings]
    steps: dict[int, Record] = {}
    for line in lines:
        generation, stop = line["generation"], line["position"]
        if not any(later > generation and position < stop for later, position in opened):
            common = {name: value for name, value in line.items() if name not in OWN}
            assert steps.setdefault(stop, common) == common
    committed = [steps[stop] for stop in sorted(steps)]
    assert [one["start"] for one in committed] == [0, *(one["position"] for one in committed)][:-1]
    assert [one["step"] for one in committed] == list(range(1, len(committed) + 1))
    return committed


def _check_samples(
    committed: Iterable[Record], dealt: Iterable[Record], *, num_samples: int, seed: int
) -> None:
    takings = _grouped(dealt, "generation", "start")
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for step in committed:
        start, stop = step["start"], step["position"]
        own = {one["process"]: one["seen"] for one in takings[step["generation"], start]}
        taken = sorted(index for seen in own.values() for index in seen)
        order = stream_indices(start, stop, num_samples=num_samples, seed=seed)
        assert taken == sorted(order.tolist()), (step, own)
        counts[start // num_samples].update(taken)
    whole = [count for epoch, count in counts.items() if epoch + 1 in counts]
    assert all(count == Counter(range(num_samples)) for count in whole)


def _check_ends(ends: list[Record], committed: list[Record]) -> None:
    for end in ends:
        assert end["position"] == committed[-1]["position"]
    assert len({(end["digest"], end["correct"]) for end in ends}) <= 1
