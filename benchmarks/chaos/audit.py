"""Counts what a chaos run promised: every sample once, equal replicas, no stall, nothing left.

    python -m benchmarks.chaos.audit FOLDER      prints one JSON object

Works on the workers' records alone and imports nothing of elastane: it knows neither the order of
the samples nor how they are dealt. The rules:

- A step counts as committed if any worker wrote its `step` line and the line is not void. A worker
  writes it after `session.step()` returned and before it can take part in anything further, so
  whoever went on from that step had it from a worker whose line is there.
- Each generation's `enter` lines tell the step that it starts from. Lines of earlier generations
  beyond that step are void: a worker committed the step and died before anybody copied it, and the
  step was made again.
- The samples of a committed step are those of all `part` lines with its generation and first
  position. Each worker writes its part before it gives its gradients away, and without them the
  step can't be committed: the lines are complete also when their writer died in the same moment.
- A torn last line is passed over. A torn part was never given away; a torn `step` line is of a
  worker that died before anybody could go on from it. If one is needed all the same, its samples
  are counted as lost.
- In each epoch of n positions, each of the indices 0 to n-1 must have come exactly once; in the
  last, unfinished epoch no index twice, and as many as the positions that were taken.
- A stall is the time between two consecutive committed steps, each dated by the first worker that
  wrote it; void steps don't end one. Without a launcher training goes on, but members don't change:
  if it was killed in the middle of a change, the time until it was back is taken off the stall.
- A false commit is a void step that telemetry or a published checkpoint had shown as final.
- Replicas are equal if in each generation all members began with the same hash of all state, at
  the same step and position, and no two workers tell two stories of one step or evaluation.
- Orphans are live processes whose environment names the job, a second after its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from benchmarks.chaos.records import Entry, Records, Step, read_lines, read_records

__all__ = ["audit", "main", "orphans"]

_VANISH_S = 1.0
_GAP_SHOWN_S = 0.1


def audit(
    folder: Path, *, num_samples: int, events: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return what a run's records prove, but for orphans.

    Args:
        folder: of the chaos run.
        num_samples: length of the dataset.
        events: what was done to the job, with `time` and `kind`.
    """
    records = read_records(folder)
    void = void_steps(records)
    chain = [step for key, step in records.steps.items() if key not in void]
    chain.sort(key=lambda step: step.step)
    lost, repeated = count_samples(chain, records, num_samples=num_samples)
    unequal = unequal_generations(records.entries)
    gaps = stalls(chain, absences=cut_changes(events))
    worst = max(gaps, key=lambda gap: gap[1], default=(0.0, 0.0))
    return {
        "samples_lost": lost,
        "samples_repeated": repeated,
        "replicas_equal": not unequal and not records.conflicts,
        "max_stall_s": round(worst[1], 3),
        "max_stall_after": event_before(worst[0] + worst[1], events),
        "cut_changes": len(cut_changes(events)),
        "false_commits": len(void & shown_as_final(folder)),
        "void_steps": len(void),
        "committed_steps": len(chain),
        "evaluations": len(records.evaluations),
        "generations": len({entry.generation for entry in records.entries}),
        "problems": [*unequal, *records.conflicts, *broken_chain(chain)],
        "sizes": sizes(chain),
        "ended": max((step.time for step in chain), default=0.0),
        "stalls": [gap for gap in gaps if gap[1] > _GAP_SHOWN_S],
    }


def void_steps(records: Records) -> set[tuple[int, int]]:
    """Return generation and number of the steps beyond which a later generation started."""
    starts: dict[int, int] = {}
    for entry in records.entries:
        known = starts.get(entry.generation, entry.start_step)
        starts[entry.generation] = min(entry.start_step, known)
    numbers = sorted(starts)
    lowest = list(accumulate((starts[number] for number in reversed(numbers)), min))[::-1]
    void = set()
    for generation, step in records.steps:
        later = bisect_right(numbers, generation)
        if later < len(numbers) and lowest[later] < step:
            void.add((generation, step))
    return void


def count_samples(chain: Sequence[Step], records: Records, *, num_samples: int) -> tuple[int, int]:
    """Return how many samples are missing in their epoch, and how many came once more."""
    seen: dict[int, bytearray] = {}
    repeated = 0
    for step in chain:
        counts = seen.setdefault(step.start // num_samples, bytearray(num_samples))
        for part in records.parts.get((step.generation, step.start), ()):
            for index in part:
                repeated += counts[index]
                counts[index] = 1
    stop = max((step.stop for step in chain), default=0)
    lost = 0
    for epoch in range(-(-stop // num_samples)):
        taken = min(stop - epoch * num_samples, num_samples)
        lost += max(taken - sum(seen.get(epoch, b"")), 0)
    return lost, repeated


def unequal_generations(entries: Sequence[Entry]) -> list[str]:
    """Return a sentence for each generation whose members began differently."""
    found: dict[int, dict[tuple[int, int, str], list[int]]] = {}
    for entry in entries:
        state = (entry.start_step, entry.start_position, entry.state_hash)
        found.setdefault(entry.generation, {}).setdefault(state, []).append(entry.worker)
    return [
        f"generation {generation}: workers {list(states.values())} began in different states"
        for generation, states in sorted(found.items())
        if len(states) > 1
    ]


def broken_chain(chain: Sequence[Step]) -> list[str]:
    """Return a sentence for each step that does not begin where the one before it ended."""
    return [
        f"step {after.step} of generation {after.generation} starts at {after.start}, but step "
        f"{before.step} of generation {before.generation} ended at {before.stop}"
        for before, after in pairwise(chain)
        if (after.step, after.start) != (before.step + 1, before.stop)
    ]


def cut_changes(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return from when to when a change of members had to wait for the launcher's return."""
    return [(event["time"], event["back"]) for event in events if event.get("in_change")]


def stalls(
    chain: Sequence[Step], *, absences: Sequence[tuple[float, float]] = ()
) -> list[tuple[float, float]]:
    """Return when each wait for the next committed step began, and how long it was."""
    times = sorted(step.time for step in chain)
    gaps = [(before, after - before) for before, after in pairwise(times)]
    for begin, end in absences:
        gaps = [(at, s - max(min(at + s, end) - max(at, begin), 0.0)) for at, s in gaps]
    return gaps


def sizes(chain: Sequence[Step]) -> list[tuple[float, int]]:
    """Return the times at which the number of workers changed, and the numbers."""
    changes: list[tuple[float, int]] = []
    for step in chain:
        if not changes or changes[-1][1] != step.world_size:
            changes.append((step.time, step.world_size))
    return changes


def event_before(time: float, events: Sequence[Mapping[str, Any]]) -> str | None:
    """Return number and kind of the last event before a time."""
    before = [event for event in events if event["time"] <= time]
    return f"{before[-1]['number']} {before[-1]['kind']}" if before else None


def shown_as_final(folder: Path) -> set[tuple[int, int]]:
    """Return generation and number of the steps that others could see as committed."""
    lines = [
        *read_lines(folder / "run" / "events.jsonl"),
        *read_lines(folder / "checkpoints.jsonl"),
    ]
    return {
        (line["generation"], line["step"])
        for line in lines
        if line["event"] in ("step", "checkpoint") and "generation" in line
    }


def orphans(job: str, *, patience_s: float = _VANISH_S) -> list[int]:
    """Return the live processes whose environment names the job; wait a little for their end."""
    deadline = time.monotonic() + patience_s
    while True:
        alive = list(_processes_of(job))
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.05)


def _processes_of(job: str) -> Iterator[int]:
    """Yield process ids; a dead process that nobody waited for has no environment any more."""
    wanted = f"ELASTANE_JOB={job}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)
        except OSError:
            continue


def main(folder: Path) -> dict[str, Any]:
    """Return the whole audit of a run that has ended."""
    setup = json.loads((folder / "setup.json").read_text())
    events = list(read_lines(folder / "script.jsonl"))
    found = audit(folder, num_samples=setup["num_samples"], events=events)
    return found | {"orphans": len(orphans(setup["job"]))}


if __name__ == "__main__":
    os.environ.pop("ELASTANE_JOB", None)
    print(json.dumps(main(Path(sys.argv[1]))))
