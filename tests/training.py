"""A small training job that session tests share: real digits, a small network, and its record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset

from elastane import GlobalBatch, LoaderOptions, Session


class Digits(Dataset[tuple[torch.Tensor, int, int]]):
    """scikit-learn's 8x8 digits; each sample also tells its index."""

    def __init__(self, num_samples: int = 301, dtype: torch.dtype = torch.float32) -> None:
        digits = load_digits()
        self._images = torch.from_numpy(digits.data[:num_samples] / 16).to(dtype)
        self._labels = digits.target[:num_samples].tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        return self._images[index], self._labels[index], index


def build_model(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10)).to(dtype)


def build_session(
    model: nn.Module,
    *,
    dataset: Any = None,
    lr: float = 0.1,
    num_steps: float = 200,
    **options: Any,
) -> tuple[Session, torch.optim.Optimizer]:
    """Return a session over the digits at base batch 8, and its optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    if "schedule" not in options:
        options["schedule"] = CosineAnnealingLR(optimizer, T_max=int(num_steps))
    defaults: dict[str, Any] = {
        "batch": GlobalBatch(32, micro_batches=4),
        "loader": LoaderOptions(seed=3),
        "progress_bar": False,
    }
    session = Session(
        model,
        optimizer=optimizer,
        dataset=Digits() if dataset is None else dataset,
        base_batch_size=8,
        num_steps=num_steps,
        **(defaults | options),
    )
    return session, optimizer


def session_over(model: nn.Module, **options: Any) -> Session:
    """Return a session over the digits at base batch 8, with an optimizer of the test's own."""
    defaults = {"dataset": Digits(), "base_batch_size": 8, "progress_bar": False}
    return Session(model, **(defaults | options))


def weights_of(model: nn.Module) -> torch.Tensor:
    """Return a copy of all weights in one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def train(
    session: Session,
    *,
    max_steps: int | None = None,
    loss_of: Callable[..., torch.Tensor] = F.cross_entropy,
) -> dict[str, Any]:
    """Train to the end, or leave after `max_steps`; return the record of it."""
    results, seen = [], []
    for images, labels, indices in session:
        seen.append((indices.tolist(), session.weight))
        session.backward(loss_of(session.model(images), labels))
        result = session.step()
        if result is not None:
            results.append(result)
            if len(results) == max_steps:
                break
    return {
        "gain": [result.gain for result in results],
        "progress": [result.progress for result in results],
        "lr": [result.lr for result in results],
        "loss": [result.loss for result in results],
        "position": [result.position for result in results],
        "grad_norm": [result.grad_norm for result in results],
        "weights": weights_of(session.model),
        "seen": seen,
    }
