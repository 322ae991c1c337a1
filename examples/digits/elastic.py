"""Trains the digits with workers that come and go: what `elastane run` starts in the demo.

    elastane run --workers 1:4 -m examples.digits.elastic --result result.json

The script is an ordinary one. How many workers there are is not its business.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

from elastane import Checkpointing, LoaderOptions, LocalBatch, Session
from examples.digits.data import load_digits
from examples.digits.train import BASE_BATCH_SIZE, BASE_LR, accuracy, build_model, train_loss


def main() -> None:
    """Train once; rank 0 writes what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--result", type=Path, required=True, help="file for the last accuracy")
    parser.add_argument("--num-steps", type=int, default=2_500, help="base steps")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train_set, validation_set = load_digits()
    torch.manual_seed(options.seed)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE_LR, momentum=0.9)
    with Session(
        model,
        optimizer=optimizer,
        schedule=CosineAnnealingLR(optimizer, T_max=options.num_steps),
        dataset=train_set,
        base_batch_size=BASE_BATCH_SIZE,
        num_steps=options.num_steps,
        batch=LocalBatch(BASE_BATCH_SIZE, micro_batches=2),
        loader=LoaderOptions(seed=options.seed),
        checkpoint=Checkpointing(every_s=5),
    ) as session:
        steps, most_workers = 0, 0
        for images, labels in session:
            session.backward(F.cross_entropy(session.model(images), labels))
            result = session.step()
            if result is None:
                continue
            steps, most_workers = result.step, max(most_workers, result.world_size)
            if result.crossed(options.num_steps / 20):
                session.evaluate(accuracy, validation_set)
        row = {
            "accuracy": session.evaluate(accuracy, validation_set).mean("accuracy"),
            "train_loss": session.evaluate(train_loss, train_set).mean("train_loss"),
            "steps": steps,
            "most_workers": most_workers,
            "generation": session.world.generation,
        }
        if session.world.rank == 0:
            options.result.write_text(json.dumps(row))


if __name__ == "__main__":
    main()
