"""What the workers of a change on real workers do: go on from a saved state, and look at the loss.

Knows a saved state and its own records; nothing of who comes and goes.

    python -m benchmarks.dynamic_sgd.worker FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.dynamic_sgd.state import HeldOut, load_bench
from benchmarks.dynamic_sgd.workers import LOSSES_NAME, SETUP_NAME
from benchmarks.runs.subject import DivergedError, steps_of


def main() -> None:
    """Train until the job is stopped; the first worker looks at the held-out loss of each step."""
    folder = Path(sys.argv[1])
    setup = json.loads((folder / SETUP_NAME).read_text())
    torch.set_num_threads(1)
    bench = load_bench(setup["spec"], setup["point"], held=True, scale=1)
    held_out = HeldOut(bench)
    with bench.session as session, (folder / LOSSES_NAME).open("a") as file:
        try:
            for result in steps_of(bench):
                if session.world.rank == 0:
                    line = {"world_size": result.world_size, "loss": _seen(held_out)}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                time.sleep(setup["step_s"])
        except DivergedError:
            if session.world.rank == 0:
                file.write(
                    json.dumps({"world_size": session.world.world_size, "loss": None}) + "\n"
                )


def _seen(held_out: HeldOut) -> float | None:
    """Return the held-out loss; the others of the group are not told if it is not finite."""
    try:
        return held_out.loss()
    except DivergedError:
        return None


if __name__ == "__main__":
    main()
