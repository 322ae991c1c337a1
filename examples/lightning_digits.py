"""Trains scikit-learn's digits under PyTorch Lightning, with workers that may come and go.

    python -m examples.lightning_digits --result result.json
    elastane run --workers 1:4 -m examples.lightning_digits --result result.json

The module is an ordinary LightningModule; the strategy is all that elastane needs. Wants the extra
`lightning`, and scikit-learn for the digits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from elastane import LocalBatch
from elastane.trainers.lightning import ElasticStrategy

BASE_BATCH_SIZE = 16
NUM_TRAIN = 1_437


class Digits(L.LightningModule):
    """A small network, tuned for batches of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Return ten scores for each image."""
        return self.layers(images)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the mean loss of a micro-batch."""
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log the share of correct answers."""
        images, labels = batch
        hits = (self(images).argmax(1) == labels).float().mean()
        self.log("accuracy", hits, prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> Any:
        """Return SGD, and a schedule in base steps."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        base_steps = int(self.trainer.estimated_stepping_batches)
        schedule = CosineAnnealingLR(optimizer, T_max=base_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 digits to train on and 360 to validate on, in one fixed split."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pixels, names = torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)
    names = names[order]
    train = TensorDataset(pixels[:NUM_TRAIN], names[:NUM_TRAIN])
    return train, TensorDataset(pixels[NUM_TRAIN:], names[NUM_TRAIN:])


@rank_zero_only
def write(path: Path, row: dict[str, object]) -> None:
    """Write the run's result, on one worker."""
    path.write_text(json.dumps(row))


def main() -> None:
    """Train once; rank 0 writes what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--result", type=Path, required=True, help="file for the last accuracy")
    parser.add_argument("--epochs", type=int, default=20, help="of 90 base steps each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    L.seed_everything(options.seed, verbose=False)
    train_set, validation_set = load_data()
    batch = LocalBatch(2 * BASE_BATCH_SIZE, micro_batches=2)  # of each worker
    strategy = ElasticStrategy(seed=options.seed, batch=batch)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, validation = Digits(), DataLoader(validation_set, batch_size=len(validation_set))
    trainer.fit(module, DataLoader(train_set, batch_size=BASE_BATCH_SIZE, shuffle=True), validation)
    (metrics,) = trainer.validate(module, validation, verbose=False)
    row = {
        **metrics,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "progress": strategy.session.progress,
        "generation": strategy.session.world.generation,
    }
    write(options.result, row)


if __name__ == "__main__":
    main()
