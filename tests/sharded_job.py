"""What tests of sharded models share: models, ways to shard them, a run's record and its oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from training import Digits

from elastane import LoaderOptions, LocalBatch, Measuring, Session
from elastane.batching import World
from elastane.data import StreamLoader
from elastane.planning import plan_step

FLOAT64 = torch.float64
LR, MOMENTUM, DECAY = 0.05, 0.9, 1e-3
BASE = 8
NUM_SAMPLES = 301
DIGITS = Digits(NUM_SAMPLES, dtype=torch.float64)


def build(seed: int = 0) -> nn.Sequential:
    """Return a network of which no layer splits evenly over the ranks."""
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 10)]
    return nn.Sequential(*layers).to(FLOAT64)


def mesh_of(kind: str, *, world_size: int) -> DeviceMesh:
    """Return a mesh of all ranks for `fsdp`, or for `hsdp` with two copies."""
    shape = (world_size,) if kind == "fsdp" else (2, world_size // 2)
    names = ("shard",) if kind == "fsdp" else ("replicate", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard(model: nn.Sequential, kind: str, *, world_size: int) -> nn.Module:
    """Shard a model over all ranks, in three units."""
    mesh = mesh_of(kind, world_size=world_size)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([whole(parameter).reshape(-1) for parameter in model.parameters()])


def session_of(
    model: nn.Module, *, groups: bool = False, **options: Any
) -> tuple[Session, torch.optim.Optimizer]:
    """Return a session and its optimizer, whose groups are the model's units if asked for."""
    parameters: Any = model.parameters()
    if groups:
        parameters = [{"params": list(layer.parameters())} for layer in list(model)[::2]]
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    defaults: dict[str, Any] = {
        "dataset": DIGITS,
        "base_batch_size": BASE,
        "num_steps": 1e9,
        "batch": LocalBatch(8),
        "compensation": None,
        "measuring": Measuring(every=1),
        "loader": LoaderOptions(seed=3),
        "progress_bar": False,
    }
    return Session(model, optimizer=optimizer, **(defaults | options)), optimizer


def train(
    session: Session, *, steps: int, weight_of: Callable[[torch.Tensor], float] | None = None
) -> dict[str, Any]:
    """Train; return what each step told, and the weights at the end."""
    results = []
    for images, labels, _ in session:
        loss = F.cross_entropy(session.model(images), labels)
        session.backward(loss, weight=None if weight_of is None else weight_of(labels))
        result = session.step()
        if result is not None:
            results.append(result)
            if len(results) == steps:
                break
    return {
        "gain": [result.gain for result in results],
        "moments": [
            (0.0, 0.0)
            if result.moments is None
            else (result.moments.variance, result.moments.sqr_norm)
            for result in results
        ],
        "norm": [result.grad_norm for result in results],
        "progress": [result.progress for result in results],
        "num_gradients": [result.num_gradients for result in results],
        "loss": [result.loss for result in results],
        "weights": weights_of(session.model),
    }


def oracle(
    policy: Any,
    *,
    world_size: int,
    steps: int,
    max_norm: float = float("inf"),
    weight_of: Callable[[torch.Tensor], float] = len,
) -> dict[str, Any]:
    """Train in one process in float64 by the formulas alone, each micro-gradient held by itself.

    AdaScale with debiased averages: `s = (sum b|g_i|^2 - B|g|^2) / (n - 1)`, `mu^2 = |g|^2 - s/B`.
    Whatever a step tells is as of before it, as in `StepResult`.
    """
    model = build()
    loader = StreamLoader(DIGITS, options=LoaderOptions(seed=3))
    velocity, sums, mass = torch.zeros_like(weights_of(model)), torch.zeros(2, dtype=FLOAT64), 0.0
    record: dict[str, Any] = {"gain": [], "moments": [], "norm": []}
    position = 0
    for step in range(steps):
        ranges, batch = micro_ranges(policy, position=position, world_size=world_size)
        scale = batch / BASE
        batches = [(images, labels) for images, labels, _ in loader.read(ranges)]
        gradients = torch.stack([gradient_of(model, *one) for one in batches])
        weights = torch.tensor([weight_of(labels) for _, labels in batches], dtype=FLOAT64)
        weights *= batch / weights.sum()
        mean = weights @ gradients / batch
        norm = float(mean.norm())
        variance = (weights @ gradients.square().sum(1) - batch * norm**2) / (len(batches) - 1)
        averages = (sums / mass).tolist() if mass else (0.0, 0.0)
        gain = gain_of(*averages, scale=scale) if mass else 1.0
        record["gain"].append(gain)
        record["moments"].append(tuple(averages))
        record["norm"].append(norm)
        theta = max(1 - scale / 1000, 0.9)
        sums = theta * sums + (1 - theta) * torch.tensor([variance, norm**2 - variance / batch])
        mass = theta * mass + 1 - theta
        mean *= min(1.0, max_norm / (norm + 1e-6))
        direction = mean + DECAY * weights_of(model)
        velocity = direction if step == 0 else MOMENTUM * velocity + direction
        move(model, -LR * gain * velocity)
        position += batch
    return record | {"weights": weights_of(model)}


def gain_of(variance: float, square: float, *, scale: float) -> float:
    noise, signal = max(variance, 0.0) / BASE, max(square, 0.0)
    return (noise + signal) / (noise / scale + signal)


def gradient_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(images), labels)
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])


@torch.no_grad()
def move(model: nn.Module, change: torch.Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, part in zip(
        parameters, change.split([p.numel() for p in parameters]), strict=True
    ):
        parameter += part.view_as(parameter)


def micro_ranges(
    policy: Any, *, position: int, world_size: int
) -> tuple[list[tuple[int, int]], int]:
    """Return the micro-batches of all ranks that count, and the step's samples."""
    plans = [
        plan_step(
            policy,
            position=position,
            num_samples=NUM_SAMPLES,
            world=World(rank=rank, world_size=world_size),
        )
        for rank in range(world_size)
    ]
    ranges = [(m.start, m.stop) for plan in plans for m in plan.micro_batches if m.weight]
    return ranges, plans[0].batch_samples
