"""Reads what the workers of a chaos run wrote down. See `benchmarks.chaos.worker` for the lines.

Knows the form of the files; nothing of elastane, nor of what the audit makes of them.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Entry", "Records", "Step", "read_lines", "read_records", "record_path"]

Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A worker begins to train in a generation."""

    generation: int
    worker: int
    rank: int
    world_size: int
    start_step: int
    start_position: int
    state_hash: str
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that a worker knows to be committed."""

    generation: int
    step: int
    start: int
    stop: int
    world_size: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """All workers' lines.

    Attributes:
        entries: in no order.
        steps: by generation and number, each as the first worker wrote it.
        parts: by generation and first position of the step, each worker's dataset indices.
        evaluations: by generation and number of the step after which it was, what came of it.
        conflicts: sentences on lines that tell two stories of one step.
    """

    entries: list[Entry] = field(default_factory=list)
    steps: dict[Key, Step] = field(default_factory=dict)
    parts: dict[Key, list[array[int]]] = field(default_factory=dict)
    evaluations: dict[Key, Any] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)


def record_path(folder: Path, worker: int) -> Path:
    """Return where a worker's lines are."""
    return folder / "records" / f"worker-{worker}.jsonl"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file; one that is torn is passed over."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue


def read_records(folder: Path) -> Records:
    """Return the lines of all workers of a run."""
    records = Records()
    for path in sorted((folder / "records").glob("worker-*.jsonl")):
        own: dict[Key, array[int]] = {}
        for line in read_lines(path):
            _take(line, records=records, own=own)
        for key, indices in own.items():
            records.parts.setdefault(key, []).append(indices)
    return records


def _take(line: dict[str, Any], *, records: Records, own: dict[Key, array[int]]) -> None:
    kind = line.pop("kind")
    if kind == "enter":
        records.entries.append(Entry(**line))
    elif kind == "step":
        _take_step(Step(**line), records)
    elif kind == "evaluation":
        _take_evaluation(line, records)
    else:  # of a part that was given twice in one generation, the first was not used
        own[line["generation"], line["start"]] = array("I", line["indices"])


def _take_step(step: Step, records: Records) -> None:
    key = (step.generation, step.step)
    known = records.steps.setdefault(key, step)
    if (known.start, known.stop) != (step.start, step.stop):
        records.conflicts.append(
            f"step {step.step} of generation {step.generation} took positions "
            f"{known.start} to {known.stop} on one worker, {step.start} to {step.stop} on another"
        )
    if step.time < known.time:
        records.steps[key] = step


def _take_evaluation(line: dict[str, Any], records: Records) -> None:
    key = (line.pop("generation"), line.pop("step"))
    known = records.evaluations.setdefault(key, line)
    if known != line:
        records.conflicts.append(
            f"the evaluation after step {key[1]} of generation {key[0]} is {known} on one worker, "
            f"{line} on another"
        )
