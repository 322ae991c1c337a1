"""What the workers of a run on real workers do: train a task, and write down how it went.

Knows a task and its own result; nothing of who comes and goes.

    python -m benchmarks.adascale.worker FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.adascale.rules import compensation_of, rule_of
from benchmarks.adascale.workers import RESULT_NAME, SETUP_NAME
from benchmarks.runs.subject import Conditions, DivergedError, set_up, steps_of, subject_of


def main() -> None:
    """Train to the end; the first worker evaluates and writes the result."""
    folder = Path(sys.argv[1])
    setup = json.loads((folder / SETUP_NAME).read_text())
    torch.set_num_threads(1)
    subject = subject_of(setup["task"], quick=setup["quick"])
    rule, compensation = rule_of("adascale"), compensation_of("adascale")
    conditions = Conditions(seed=setup["seed"], rule=rule, compensation=compensation)
    bench = set_up(subject, conditions)
    metric = loss = None
    with bench.session as session:
        try:
            for _ in steps_of(bench):
                time.sleep(setup["step_s"])
            if session.world.rank == 0:
                metric, loss = bench.evaluate()
        except DivergedError:
            pass
        if session.world.rank == 0:
            result = {"metric": metric, "loss": loss, "diverged": metric is None}
            (folder / RESULT_NAME).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
