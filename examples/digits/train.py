"""Trains the digits, at one scale after the other. Runs under plain python and under torchrun.

    torchrun --standalone --nproc-per-node 2 -m examples.digits.train adascale:16 adascale:64

Schedule and hyper-parameters are those of batch 16; only rule and batch differ. (At batch 16 the
learning rates 0.01 and 0.02 were equally good; this is the smaller.)
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

from elastane import AdaScale, GlobalBatch, Linear, LoaderOptions, Session, WarmUp
from elastane.errors import NonFiniteError
from examples.digits.data import load_digits

BASE_BATCH_SIZE = 16
BASE_LR = 0.01
# Folders are called by rule and batch, as the table is: the plot's legend shows their names.
FOLDERS = {"base": "base", "adascale": "adascale", "linear": "linear-warmup"}
RULES = {"base": AdaScale(), "adascale": AdaScale(), "linear": WarmUp(rule=Linear())}


def folder_name(rule: str, *, scale: int) -> str:
    """Return what the folder of a run is called, for example `adascale-batch256`."""
    return f"{FOLDERS[rule]}-batch{scale * BASE_BATCH_SIZE}"


def build_model() -> nn.Module:
    """Return a small CNN of 55,000 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def accuracy(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """Return the number of correct answers in a batch."""
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).sum()}


def train_loss(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """Return the sum of the losses in a batch."""
    images, labels = batch
    return {"train_loss": F.cross_entropy(model(images), labels, reduction="sum")}


def train(
    rule: str, *, scale: int, lr: float, num_steps: int, seed: int, out: Path
) -> dict[str, object]:
    """Train once and return a row of the table."""
    train_set, validation_set = load_digits()
    torch.manual_seed(seed)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    with Session(
        model,
        optimizer=optimizer,
        schedule=CosineAnnealingLR(optimizer, T_max=num_steps),
        dataset=train_set,
        base_batch_size=BASE_BATCH_SIZE,
        num_steps=num_steps,
        rule=RULES[rule],
        batch=GlobalBatch(scale * BASE_BATCH_SIZE),
        loader=LoaderOptions(seed=seed),
        run_dir=out / folder_name(rule, scale=scale),
    ) as session:
        step, diverged = 0, False
        try:
            for images, labels in session:
                session.backward(F.cross_entropy(session.model(images), labels))
                result = session.step()
                if result is None:
                    continue
                step = result.step
                if step == 1 or result.crossed(num_steps / 20):
                    session.evaluate(accuracy, validation_set)
        except NonFiniteError:
            diverged = True
        loss = session.evaluate(train_loss, train_set).mean("train_loss")
        return {
            "scale": scale,
            "batch": scale * BASE_BATCH_SIZE,
            "rule": rule,
            "accuracy": session.evaluate(accuracy, validation_set).mean("accuracy"),
            "train_loss": loss if math.isfinite(loss) else None,
            "steps": step,
            "diverged": diverged,
            "workers": session.world.world_size,
            "rank": session.world.rank,
        }


def main() -> None:
    """Train each RULE:SCALE in turn; rank 0 prints its rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="+", metavar="RULE:SCALE", help="for example adascale:16")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"))
    parser.add_argument("--num-steps", type=int, default=2_500, help="base steps")
    parser.add_argument("--lr", type=float, default=BASE_LR, help="learning rate at batch 16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for run in options.runs:
        rule, _, scale = run.partition(":")
        row = train(
            rule,
            scale=int(scale),
            lr=options.lr,
            num_steps=options.num_steps,
            seed=options.seed,
            out=options.out,
        )
        if row.pop("rank") == 0:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
