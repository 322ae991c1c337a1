"""What the job of the chaos benchmark trains, and the record that each worker keeps of it.

Knows a session and its own record; nothing of who comes and goes, or of what is audited.

    python -m benchmarks.chaos.worker FOLDER

Each worker appends JSON lines to ``FOLDER/records/worker-<id>.jsonl``:

    line    written                           holds
    enter   before the first step of each     generation, worker, rank, world_size, start_step,
            generation that it takes part in  start_position, state_hash, time
    part    before the last backward pass of  generation, start, indices: which samples of the
            a step, which gives its part away dataset it contributes to the step
    step    when it knows that the step       generation, step, start, stop, world_size, time
            was committed
    evaluation  every so many steps           generation, step, sums, num_samples
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset

from elastane import AdaScale, Checkpointing, LoaderOptions, LocalBatch, Session
from elastane._env import elastic_launch

BASE_BATCH_SIZE = 16
ENDLESS = 1e9
EVALUATE_EVERY, NUM_EVALUATED = 50, 400


class IndexedDigits(Dataset[tuple[Tensor, Tensor, int]]):
    """The digits that the benchmark prepared; each sample also tells its index."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self._images = torch.from_numpy(arrays["images"]).float() / 255
            self._labels = torch.from_numpy(arrays["labels"]).long()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self._images[index], self._labels[index], index


class Record:
    """Appends lines, each in one write: a worker that is killed leaves whole lines behind."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, kind: str, **values: object) -> None:
        """Append one line."""
        os.write(self._file, json.dumps({"kind": kind, **values}).encode() + b"\n")


def build_model(num_pixels: int) -> nn.Module:
    """Return a small network with batch statistics."""
    return nn.Sequential(
        *(nn.Linear(num_pixels, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    )


def state_hash(session: Session, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of all state that the workers have in common: all but random generators."""
    state = session.state_dict()
    del state["rng"]
    digest = hashlib.blake2b(digest_size=8)
    _fold([session.model.state_dict(), optimizer.state_dict(), state], digest)
    return digest.hexdigest()


def _fold(value: object, digest: hashlib.blake2b) -> None:
    if isinstance(value, Tensor):
        digest.update(value.detach().contiguous().numpy().tobytes())
    elif isinstance(value, Mapping):
        for name in value:
            digest.update(repr(name).encode())
            _fold(value[name], digest)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for one in value:
            _fold(one, digest)
    else:
        digest.update(repr(value).encode())


def count_hits(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return how many of a batch the model gets right, and the sum of the batch's indices."""
    images, labels, indices = batch
    return {"correct": (model(images).argmax(1) == labels).sum(), "indices": indices.sum()}


def train(
    session: Session,
    optimizer: torch.optim.Optimizer,
    *,
    dataset: IndexedDigits,
    record: Record,
    worker: int,
    step_s: float,
) -> None:
    """Train until the job is stopped; steps take at least `step_s`, others want the CPU, too."""
    generation, indices = -1, []
    evaluated = Subset(dataset, range(NUM_EVALUATED))
    for images, labels, own in session:
        if not session.warming and session.world.generation != generation:
            generation = session.world.generation
            record.write("enter", **_standing(session, optimizer), worker=worker)
        indices += own.tolist()
        if session.is_last_micro_batch:
            time.sleep(step_s)
            if not session.warming:
                record.write("part", generation=generation, start=session.position, indices=indices)
            indices = []
        session.backward(F.cross_entropy(session.model(images), labels))
        result = session.step()
        if result is not None and not result.skipped:
            record.write(
                "step",
                generation=result.generation,
                step=result.step,
                start=result.position - result.batch_samples,
                stop=result.position,
                world_size=result.world_size,
                time=time.monotonic(),
            )
            if result.step % EVALUATE_EVERY == 0:
                found = session.evaluate(count_hits, evaluated, batch_size=50)
                record.write(
                    "evaluation",
                    generation=result.generation,
                    step=result.step,
                    sums=found.sums,
                    num_samples=found.num_samples,
                )


def _standing(session: Session, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "generation": session.world.generation,
        "rank": session.world.rank,
        "world_size": session.world.world_size,
        "start_step": session.state_dict()["controller"]["step"],
        "start_position": session.position,
        "state_hash": state_hash(session, optimizer),
        "time": time.monotonic(),
    }


def main() -> None:
    """Open a session on the prepared digits and train."""
    folder = Path(sys.argv[1])
    launch = elastic_launch()
    assert launch is not None, "start this with `elastane run`"
    setup = json.loads((folder / "setup.json").read_text())
    every_steps = setup["checkpoint_steps"] or None
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR2)  # the benchmark asks where a job hangs
    dataset = IndexedDigits(folder / "digits.npz")
    model = build_model(dataset[0][0].numel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    with Session(
        model,
        optimizer=optimizer,
        schedule=lambda progress: 0.6 + 0.4 * math.cos(progress / 500),
        dataset=dataset,
        base_batch_size=BASE_BATCH_SIZE,
        num_steps=ENDLESS,
        rule=AdaScale(),
        batch=LocalBatch(BASE_BATCH_SIZE, micro_batches=2),
        loader=LoaderOptions(seed=0, num_workers=1),
        checkpoint=Checkpointing(every_s=None, every_steps=every_steps),
        progress_bar=False,
    ) as session:
        record = Record(folder / "records" / f"worker-{launch.worker}.jsonl")
        train(
            session,
            optimizer,
            dataset=dataset,
            record=record,
            worker=launch.worker,
            step_s=setup["step_s"],
        )


if __name__ == "__main__":
    main()
