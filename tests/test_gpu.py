"""The same training on a CUDA device; skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from training import build_model, build_session, train
from workers import run_workers

from elastane import GlobalBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_device(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels.to(logits.device))


def train_on(device: str, *, max_steps: int = 50, **options: Any) -> dict[str, Any]:
    model = build_model().to(device)
    session, _ = build_session(model, **options)
    model.register_forward_pre_hook(lambda _, inputs: tuple(x.to(device) for x in inputs))
    with session:
        record = train(session, max_steps=max_steps, loss_of=on_device)
    record["weights"] = record["weights"].cpu()
    return record


def test_a_gpu_trains_what_the_cpu_trains() -> None:
    wanted, record = train_on("cpu"), train_on("cuda")
    assert record["gain"] == pytest.approx(wanted["gain"], rel=1e-3)
    assert torch.allclose(record["weights"], wanted["weights"], atol=1e-3)


def test_float16_with_a_scaler_measures_the_same_gain() -> None:
    wanted = train_on("cuda")
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        record = train_on("cuda", scaler=scaler)
    assert record["gain"][1:20] == pytest.approx(wanted["gain"][1:20], rel=0.05)


def train_on_own_gpu() -> dict[str, Any]:
    device = f"cuda:{torch.distributed.get_rank()}"
    torch.cuda.set_device(device)
    return train_on(device, batch=GlobalBatch(32, micro_batches=4))


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_over_nccl_train_what_one_trains(tmp_path: Path) -> None:
    wanted = train_on("cuda")
    records = run_workers(train_on_own_gpu, world_size=2, folder=tmp_path, backend="nccl")
    assert torch.equal(records[0]["weights"], records[1]["weights"])
    assert records[0]["gain"] == pytest.approx(wanted["gain"], rel=1e-3)
