"""A change of batch by real workers that come or go, beside the same change emulated.

Starts `elastane run` on a saved state and changes the number of workers as `elastane scale` does.
Knows nothing of how the workers train.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.dynamic_sgd.measure import WINDOW, peak_ratio
from benchmarks.dynamic_sgd.state import HeldOut, load_bench
from benchmarks.launched import JobError, LaunchedJob, wait_until
from benchmarks.runs.subject import DivergedError, steps_of

__all__ = ["LOSSES_NAME", "SETUP_NAME", "change_on_workers", "place_of_change"]

LOSSES_NAME, SETUP_NAME = "losses.jsonl", "setup.json"
# Sleeping makes the stretch before a growth short in steps: new workers take seconds to start.
_STEP_S = 0.05
_LIMIT_S, _POLL_S = 600.0, 0.1


@dataclass(slots=True, kw_only=True)
class _Job(LaunchedJob):
    worker = "benchmarks.dynamic_sgd.worker"


def change_on_workers(spec: Mapping[str, Any], needs: Mapping[str, Any]) -> dict[str, Any]:
    """Have workers join or leave, and then train as many steps on one worker with the same batches.

    Returns:
        Number of workers of each step from the change on, the peaks of the held-out loss over its
        level before on the workers and emulated, and the largest relative difference of the two
        held-out losses.

    Raises:
        JobError: the job ended, or did not do what it was told.
    """
    (began,) = needs.values()
    point = began["points"].get(spec["when"])
    if point is None:
        return {"no_start": True}
    seen = _on_workers(spec, point)
    sizes = [line["world_size"] for line in seen]
    change = place_of_change(sizes, before=spec["before"])
    emulated = [*_emulated(spec, point, sizes)]
    losses = [line["loss"] for line in seen]
    lost = None in losses or len(emulated) < len(losses)
    found: dict[str, Any] = {
        "no_start": False,
        "diverged": lost,
        "sizes": _stretches(sizes[change:]),
    }
    if lost:
        return found
    return found | {
        "peak_ratio": peak_ratio(losses[change - WINDOW : change], losses[change:]),
        "emulated_peak_ratio": peak_ratio(emulated[change - WINDOW : change], emulated[change:]),
        "difference": max(
            abs(one - other) / other for one, other in zip(losses, emulated, strict=True)
        ),
    }


def place_of_change(sizes: Sequence[int], *, before: int) -> int:
    """Return the first step with another number of workers than before, after enough with that.

    A job may begin with fewer workers than were asked for, while the others still start.
    """
    seen = 0
    for place, size in enumerate(sizes):
        if size != before and seen >= WINDOW:
            return place
        seen += size == before
    raise JobError(f"the number of workers stayed {before}, or was so in fewer than {WINDOW} steps")


def _on_workers(spec: Mapping[str, Any], point: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return workers and held-out loss of each step, from the state on."""
    before, after = spec["before"], spec["after"]
    with tempfile.TemporaryDirectory(prefix="elastane-dynamic-") as name:
        folder = Path(name)
        setup = {"spec": dict(spec), "point": dict(point), "step_s": _STEP_S}
        (folder / SETUP_NAME).write_text(json.dumps(setup))
        path = folder / LOSSES_NAME
        job = _Job(
            folder=folder,
            name=f"dynamic-{os.getpid()}-{spec['seed']}",
            max_workers=max(before, after),
        )

        def count(size: int) -> int:
            job.check()
            return sum(line["world_size"] == size for line in _lines(path))

        try:
            job.launch({"--initial": str(before)})
            wait_until(
                lambda: count(before) >= WINDOW,
                limit_s=_LIMIT_S,
                what=f"step {WINDOW}",
                poll_s=_POLL_S,
            )
            job.ask("scale", n=after)
            steps = spec["horizon"]
            wait_until(
                lambda: count(after) >= steps or _has_diverged(path),
                limit_s=_LIMIT_S,
                what=f"step {steps} on {after} workers",
                poll_s=_POLL_S,
            )
        finally:
            job.end()
        return _lines(path)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _has_diverged(path: Path) -> bool:
    return any(line["loss"] is None for line in _lines(path))


def _emulated(
    spec: Mapping[str, Any], point: Mapping[str, Any], sizes: Sequence[int]
) -> Iterator[float]:
    """Yield the held-out losses of steps with so many emulated workers, while they are finite."""
    bench = load_bench(spec, point, held=True, scale=sizes[0])
    held_out = HeldOut(bench)
    try:
        with bench.session:
            for step, _ in enumerate(steps_of(bench), start=1):
                yield held_out.loss()
                if step == len(sizes):
                    return
                bench.batch.scale = sizes[step]
    except DivergedError:
        return


def _stretches(sizes: Sequence[int]) -> list[list[int]]:
    """Return numbers of workers in a row, each with its number of steps."""
    found: list[list[int]] = []
    for size in sizes:
        if found and found[-1][0] == size:
            found[-1][1] += 1
        else:
            found.append([size, 1])
    return found
