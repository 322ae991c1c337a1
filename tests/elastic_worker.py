"""What the workers of elastic tests run: the digits under a session, with a record of each step.

python elastic_worker.py FOLDER OPTIONS (JSON: see `main`)
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR
from training import Digits, weights_of

import elastane
from elastane import GlobalBatch, LocalBatch, LoaderOptions, Session
from elastane._env import elastic_launch


def digest(session: Session, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of all state that workers must have in common."""
    momentum = [
        value.reshape(-1).double()
        for state in optimizer.state_dict()["state"].values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    buffers = [buffer.reshape(-1).double() for buffer in session.model.buffers()]
    state = session.state_dict()
    state.pop("rng")
    everything = torch.cat([weights_of(session.model).double(), *momentum, *buffers])
    text = everything.numpy().tobytes() + repr(state).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def build_model(*, batch_norm: bool, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(int(time.time() * 1000) % 2**31)  # workers must not need equal seeds
    norm = [nn.BatchNorm1d(24)] if batch_norm else []
    return nn.Sequential(nn.Linear(64, 24), *norm, nn.Tanh(), nn.Linear(24, 10)).to(dtype)


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    launch = elastic_launch()
    assert launch is not None
    torch.set_num_threads(1)
    dtype = getattr(torch, options.get("dtype", "float32"))
    model = build_model(batch_norm=options.get("batch_norm", False), dtype=dtype)
    if "seed" in options:
        torch.manual_seed(options["seed"])
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    num_steps = options.get("num_steps", 200)
    schedules = {
        "cosine": lambda: CosineAnnealingLR(optimizer, T_max=num_steps),
        "multistep": lambda: MultiStepLR(optimizer, [20, 40]),
    }
    batches = {"local": lambda: LocalBatch(8, micro_batches=2), "grid": lambda: GlobalBatch(32, micro_batches=4)}
    rules = {"adascale": elastane.AdaScale(), "linear": elastane.Linear()}
    dataset = Digits(options.get("num_samples", 301), dtype=dtype)
    record = (folder / f"record-{launch.worker}.jsonl").open("a")

    def write(kind: str, **fields: Any) -> None:
        record.write(json.dumps({"kind": kind, "time": time.monotonic(), **fields}) + "\n")
        record.flush()

    def correct(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        images, labels, _ = batch
        time.sleep(options.get("evaluation_s", 0) )
        return {"correct": (model(images).argmax(1) == labels).sum()}

    with Session(
        model,
        optimizer=optimizer,
        schedule=schedules[options.get("schedule", "cosine")](),
        dataset=dataset,
        base_batch_size=8,
        num_steps=num_steps,
        rule=rules[options.get("rule", "adascale")],
        batch=batches[options.get("batch", "local")](),
        loader=LoaderOptions(seed=3, num_workers=options.get("num_workers", 0)),
        progress_bar=False,
    ) as session:
        generation, seen = -1, []
        for images, labels, indices in session:
            world = session.world
            if not session.warming and world.generation != generation:
                generation, seen = world.generation, []
                write(
                    "generation",
                    generation=generation,
                    rank=world.rank,
                    world_size=world.world_size,
                    position=session.position,
                    digest=digest(session, optimizer),
                )
            if not session.warming and session.weight:
                seen += indices.tolist()
            time.sleep(options.get("step_s", 0))
            if session.position >= options.get("fail_at", 10**9) and world.rank == 1:
                raise RuntimeError("the user's own mistake")
            session.backward(F.cross_entropy(session.model(images), labels))
            is_last = session.is_last_micro_batch
            result = session.step()
            if result is None:
                seen = [] if is_last else seen  # a step that broke is made again
                continue
            write(
                "step",
                generation=result.generation,
                step=result.step,
                position=result.position,
                batch=result.batch_samples,
                seen=seen,
                lr=result.lr,
                gain=result.gain,
                progress=result.progress,
                loss=result.loss,
                rank=world.rank,
                world_size=result.world_size,
            )
            seen = []
            if options.get("evaluate_every") and result.step % options["evaluate_every"] == 0:
                evaluation = session.evaluate(correct, dataset, batch_size=64)
                write("evaluation", step=result.step, correct=evaluation.sums["correct"])
        evaluation = session.evaluate(correct, dataset, batch_size=64)
        write(
            "end",
            correct=evaluation.sums["correct"],
            digest=digest(session, optimizer),
            weights=weights_of(session.model).double().tolist(),
            position=session.position,
            lr=optimizer.param_groups[0]["lr"],
        )


if __name__ == "__main__":
    main()
