"""What a user of torchrun writes to survive a change: DDP, a checkpoint each 10 steps, a resume.

Knows nothing of elastane but the model and the record of the other benchmark.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.resize.worker import BATCH, Record, build_model, read_digits

CHECKPOINT_EVERY = 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--digits", type=Path, required=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    given = parser.parse_args()
    record = Record(given.records)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    bare = build_model(given.parameters)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.02, momentum=0.9)
    step = resume(bare, optimizer, given.checkpoint)
    model = DistributedDataParallel(bare)
    digits = read_digits(given.digits)
    sampler = DistributedSampler(digits)
    loader = DataLoader(digits, batch_size=BATCH, sampler=sampler)
    for epoch in range(10**9):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            record.write("step", worker=rank, step=step, world_size=world_size)
            if rank == 0 and step % CHECKPOINT_EVERY == 0:
                save(bare, optimizer, given.checkpoint, step=step)


def save(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path, *, step: int
) -> None:
    part = path.with_suffix(".part")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, part)
    part.replace(path)


def resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> int:
    """Load the checkpoint, if there is one, and return its step."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


if __name__ == "__main__":
    main()
