"""The training script of the benchmarks: the digits under a session, one line for each step.

Knows nothing of who starts it or what is done to it; it runs under any launcher.

python -m benchmarks.resize.worker --digits FILE --records DIR --parameters N [--steps N]
    [--follow-mb X] [--marks]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.resize import marks
from elastane import LoaderOptions, LocalBatch, Session
from elastane.elastic import following

BATCH = 16
NUM_PIXELS, NUM_CLASSES = 64, 10


class Record:
    """Writes what this process saw, line by line: what it wrote outlives a SIGKILL."""

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        path = folder / f"{self._pid}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **fields: float) -> None:
        """Add a line: what happened, when, and how much processor time it took so far."""
        now = {"kind": kind, "pid": self._pid, "time": time.monotonic()}
        line = json.dumps({**now, "cpu": time.process_time(), **fields})
        os.write(self._file, line.encode() + b"\n")


def width_of(parameters: int) -> int:
    """Return the width of two hidden layers that make a network of about so many parameters."""
    linear = NUM_PIXELS + NUM_CLASSES + 2
    return round((math.sqrt(linear**2 + 4 * parameters) - linear) / 2)


def build_model(parameters: int) -> nn.Module:
    """Return a network over the digits with about so many parameters."""
    width = width_of(parameters)
    return nn.Sequential(
        nn.Linear(NUM_PIXELS, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, NUM_CLASSES),
    )


def read_digits(path: Path) -> TensorDataset:
    """Return the digits that the driver wrote; importing their source takes a second a worker."""
    with np.load(path) as digits:
        images, labels = digits["images"], digits["labels"]
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))


def main() -> None:
    given = parse()
    if given.follow_mb is not None:
        following.LEAST_BYTES = given.follow_mb * 2**20
    record = Record(given.records)
    worker = int(os.environ.get("ELASTANE_WORKER", os.environ.get("RANK", "0")))
    if given.marks:
        marks.install(lambda name: record.write(name, worker=worker))
    model = build_model(given.parameters)
    with Session(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        dataset=read_digits(given.digits),
        base_batch_size=BATCH,
        num_steps=1e12,
        batch=LocalBatch(BATCH),
        loader=LoaderOptions(num_workers=1),
        run_dir=given.run_dir,
        progress_bar=False,
    ) as session:
        train(session, record=record, worker=worker, max_steps=given.steps)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--digits", type=Path, required=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--follow-mb", type=float)
    parser.add_argument("--marks", action="store_true")
    return parser.parse_args()


def train(session: Session, *, record: Record, worker: int, max_steps: int) -> None:
    """Train, and write down each step that was finished or broke."""
    for images, labels in session:
        warming, is_last = session.warming, session.is_last_micro_batch
        session.backward(F.cross_entropy(session.model(images), labels))
        if warming and is_last:
            record.write("ready", worker=worker)
        result = session.step()
        if result is not None:
            where = {"generation": result.generation, "world_size": result.world_size}
            record.write("step", worker=worker, step=result.step, **where)
            if result.step >= max_steps:
                session.stop()
        elif is_last and not warming:
            record.write("discarded", worker=worker)


if __name__ == "__main__":
    main()
