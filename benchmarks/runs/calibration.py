"""What a base step and an evaluation of a task cost here, and what a plan will cost by that.

Knows the ledger's own times once there are some, which count for more than any calibration.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from benchmarks.runs.ledger import Ledger, Run
from benchmarks.runs.subject import Conditions, set_up, steps_of, subject_of
from elastane import Identity

__all__ = ["calibrate", "calibration_run", "predicted_s"]

_UNTIMED, _TIMED = 3, 12


def calibration_run(task: str, *, quick: bool) -> Run:
    """Return the run that calibrates a task."""
    spec = {"task": task, "quick": quick}
    return Run(name=f"calibrate {task}", does="calibrate", spec=spec, group="calibrate")


def calibrate(spec: Mapping[str, Any], needs: Mapping[str, Any]) -> dict[str, float]:  # noqa: ARG001
    """Return the processor seconds of a base step and of an evaluation."""
    bench = set_up(
        subject_of(spec["task"], quick=spec["quick"]), Conditions(seed=0, rule=Identity())
    )
    ends: list[float] = []
    with bench.session:
        for _ in islice(steps_of(bench), _UNTIMED + _TIMED):
            ends.append(time.process_time())
    began = time.process_time()
    bench.evaluate()
    return {
        "base_step_s": (ends[-1] - ends[_UNTIMED - 1]) / _TIMED,
        "evaluation_s": time.process_time() - began,
    }


def predicted_s(runs: Sequence[Run], *, ledger: Ledger) -> dict[str, float]:
    """Return the processor seconds by task of those runs that are still to be carried out.

    A run costs what the others of its group did, or if none has ended, what its task's
    calibration makes of its base steps and evaluations.
    """
    known: dict[str, list[float]] = defaultdict(list)
    for entry in ledger.entries:
        if entry.record is not None:
            known[entry.group].append(entry.process_s)
    seconds: dict[str, float] = defaultdict(float)
    for run in runs:
        if ledger.record(run.name) is None:
            seconds[run.spec["task"]] += (
                statistics.fmean(known[run.group])
                if run.group in known
                else _calibrated_s(run, ledger)
            )
    return dict(seconds)


def _calibrated_s(run: Run, ledger: Ledger) -> float:
    costs = ledger.record(f"calibrate {run.spec['task']}")
    if costs is None:
        return 0.0
    return run.base_steps * costs["base_step_s"] + run.evaluations * costs["evaluation_s"]
