"""What the job of the blackout benchmark trains, and what each worker writes down of it.

Knows a session and its own lines; nothing of who is killed, or of what is checked.

    python -m benchmarks.blackout.worker FOLDER

Each worker appends to ``FOLDER/records/worker-<id>.jsonl`` the lines that the chaos benchmark's
audit reads (see `benchmarks.chaos.worker`), and to ``FOLDER/stands/worker-<id>.jsonl`` where it
stands: when it enters a generation and after each committed step (see `lineage.Stand`).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from benchmarks.chaos.worker import Record, state_hash
from elastane import Checkpointing, LocalBatch, Session, StepResult
from elastane._env import elastic_launch
from examples.digits.train import BASE_BATCH_SIZE, BASE_LR, accuracy, build_model


def load(path: Path, *, part: str) -> TensorDataset:
    """Return the digits of a part, each with its index."""
    with np.load(path) as arrays:
        images = torch.from_numpy(arrays[f"{part}_images"])
        labels = torch.from_numpy(arrays[f"{part}_labels"])
    return TensorDataset(images, labels, torch.arange(len(labels)))


class Diary:
    """A worker's lines.

    Args:
        folder: of the benchmark.
        worker: the worker's id.
        session: that trains.
        optimizer: its optimizer.
    """

    def __init__(
        self, folder: Path, *, worker: int, session: Session, optimizer: torch.optim.Optimizer
    ) -> None:
        self._audited = Record(folder / "records" / f"worker-{worker}.jsonl")
        self._stands = Record(folder / "stands" / f"worker-{worker}.jsonl")
        self._worker, self._session, self._optimizer = worker, session, optimizer
        self.generation = -1

    def enter(self) -> None:
        """Write that the worker begins to train in a generation."""
        world = self._session.world
        self.generation = world.generation
        step = self._session.state_dict()["controller"]["step"]
        stand = self._stand(step, world_size=world.world_size)
        self._stands.write("enter", **stand)
        self._audited.write(
            "enter",
            worker=self._worker,
            rank=world.rank,
            generation=world.generation,
            world_size=world.world_size,
            start_step=step,
            start_position=self._session.position,
            state_hash=stand["state_hash"],
            time=time.monotonic(),
        )

    def give(self, indices: list[int]) -> None:
        """Write which samples the worker contributes to the present step."""
        start = self._session.position
        self._audited.write("part", generation=self.generation, start=start, indices=indices)

    def commit(self, result: StepResult) -> None:
        """Write that a step was committed."""
        stand = self._stand(result.step, world_size=result.world_size)
        self._stands.write("step", **stand | {"applied_lr": result.lr})
        self._audited.write(
            "step",
            generation=result.generation,
            step=result.step,
            start=result.position - result.batch_samples,
            stop=result.position,
            world_size=result.world_size,
            time=time.monotonic(),
        )

    def _stand(self, step: int, *, world_size: int) -> dict[str, Any]:
        return {
            "worker": self._worker,
            "generation": self._session.world.generation,
            "step": step,
            "world_size": world_size,
            "position": self._session.position,
            "epoch": self._session.epoch,
            "progress": self._session.progress,
            "lr": self._optimizer.param_groups[0]["lr"],
            "state_hash": state_hash(self._session, self._optimizer),
        }


def train(session: Session, *, diary: Diary, step_s: float) -> None:
    """Train to the end; steps take at least `step_s`, so that something can happen in between."""
    indices: list[int] = []
    for images, labels, own in session:
        if not session.warming and session.world.generation != diary.generation:
            diary.enter()
        indices += own.tolist()
        if session.is_last_micro_batch:
            time.sleep(step_s)
            if not session.warming:
                diary.give(indices)
            indices = []
        session.backward(F.cross_entropy(session.model(images), labels))
        result = session.step()
        if result is not None and not result.skipped:
            diary.commit(result)


def main() -> None:
    """Open a session on the prepared digits and train; rank 0 writes the last accuracy."""
    folder = Path(sys.argv[1])
    launch = elastic_launch()
    assert launch is not None, "start this with `elastane run`"
    setup = json.loads((folder / "setup.json").read_text())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE_LR, momentum=0.9)
    with Session(
        model,
        optimizer=optimizer,
        schedule=CosineAnnealingLR(optimizer, T_max=setup["num_steps"]),
        dataset=load(folder / "digits.npz", part="train"),
        base_batch_size=BASE_BATCH_SIZE,
        num_steps=setup["num_steps"],
        batch=LocalBatch(BASE_BATCH_SIZE, micro_batches=2),
        checkpoint=Checkpointing(every_s=None, every_steps=setup["interval"]),
        progress_bar=False,
    ) as session:
        diary = Diary(folder, worker=launch.worker, session=session, optimizer=optimizer)
        train(session, diary=diary, step_s=setup["step_s"])
        held_out = load(folder / "digits.npz", part="held_out")
        right = session.evaluate(lambda inner, batch: accuracy(inner, batch[:2]), held_out)
        if session.world.rank == 0:
            (folder / "accuracy.json").write_text(json.dumps(right.mean("accuracy")))


if __name__ == "__main__":
    main()
