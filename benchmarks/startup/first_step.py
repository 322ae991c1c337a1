"""A script that makes one step and ends: by a session, or by hand as under torchrun.

python -m benchmarks.startup.first_step session|plain FOLDER

Each worker leaves a file in the folder that says when its first step had ended, on the clock that
all processes of a machine share.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 16


def _training() -> tuple[nn.Module, torch.optim.SGD, TensorDataset]:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    dataset = TensorDataset(torch.randn(1_024, 64), torch.randint(10, (1_024,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), dataset


def by_hand() -> None:
    dist.init_process_group("gloo")
    model, optimizer, dataset = _training()
    wrapper = DistributedDataParallel(model)
    images, labels = next(
        iter(DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset)))
    )
    F.cross_entropy(wrapper(images), labels).backward()
    optimizer.step()


def by_session(done: Path) -> None:
    from elastane import Session

    model, optimizer, dataset = _training()
    with Session(
        model,
        optimizer=optimizer,
        dataset=dataset,
        base_batch_size=BATCH,
        num_steps=1e6,
        progress_bar=False,
    ) as session:
        for images, labels in session:
            session.backward(F.cross_entropy(session.model(images), labels))
            if session.step() is not None and not done.exists():
                write(done)
                session.stop()


def write(done: Path) -> None:
    part = done.with_suffix(".part")
    part.write_text(str(time.monotonic()))
    part.replace(done)


def _wait_for_all(folder: Path) -> None:
    """Wait until each worker has made its step: one that leaves before can break the others'."""
    while len([*folder.glob("*.done")]) < dist.get_world_size():
        time.sleep(0.01)


def main() -> None:
    way, folder = sys.argv[1:]
    done = Path(folder, f"{os.getpid()}.done")
    if way == "session":
        by_session(done)
    else:
        by_hand()
        write(done)
        _wait_for_all(done.parent)
        os._exit(0)  # not by way of the group's end, where torch 2.13 aborts now and then


if __name__ == "__main__":
    main()
