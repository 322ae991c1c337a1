"""What library and oracle both know: the model, the loss and the numbers of a short training.

Plain values and plain PyTorch; knows neither of the two that train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.oracle.models import perceptron

__all__ = [
    "AVERAGE",
    "BASE_BATCH",
    "NUM_STEPS",
    "Adam",
    "Batch",
    "Group",
    "Job",
    "MicroBatch",
    "Trace",
    "Window",
    "cross_entropy",
    "digits",
    "num_samples_of",
    "schedule",
]

BASE_BATCH = 8
NUM_STEPS = 50
AVERAGE = "average"

Batch = Sequence[Tensor]
"""Images, labels and indices of some samples."""


def schedule(progress: float) -> float:
    """Return the multiplier of the learning rate: it tells the smallest error of progress."""
    return 0.995**progress


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss over the samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def num_samples_of(batch: Batch) -> float:
    """Return the weight of a mean over samples."""
    return float(len(batch[1]))


@cache
def digits(num_samples: int) -> tuple[Tensor, Tensor]:
    """Return images (multiples of 1/16, exact in any precision above 8 bits) and labels."""
    data: Any = load_digits()
    images = torch.from_numpy(data.data[:num_samples] / 16)
    return images, torch.from_numpy(data.target[:num_samples])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A parameter group of the optimizer.

    Attributes:
        prefix: what the names of its parameters begin with.
        lr: learning rate of the base batch.
        momentum: of SGD.
        weight_decay: of SGD.
    """

    prefix: str = ""
    lr: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam with decoupled decay, under the square root of the gain.

    Attributes:
        beta1: of the average of gradients, at the base batch.
        beta2: of the average of squares, at the base batch.
        eps: at the base batch.
        preconditions: whether the gain is measured as Adam sees the gradients.
        first_follows: whether `beta1` keeps its half-life in samples,
        second_follows: and `beta2` does.
        eps_follows: whether `eps` follows the batch.
        decay_follows: whether decay counts progress.
        base_squares: whether squares are those of base batches.
    """

    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-3
    preconditions: bool = False
    first_follows: bool = False
    second_follows: bool = False
    eps_follows: bool = False
    decay_follows: bool = False
    base_squares: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A short training.

    Attributes:
        model: builds it, always with the same weights.
        loss: mean loss of a micro-batch.
        weight: what the mean is over.
        num_samples: of the data.
        groups: of the optimizer.
        gain_per_group: whether each group has a factor of its own.
        measured_every: every how many steps the moments are taken.
        max_norm: norm to which the mean gradient is clipped.
        trains: tells by name whether a parameter requires a gradient in a step, from 0.
        poisoned: windows, counted with those that are skipped, whose loss is made infinite.
        average_decay: of a moving average of the weights, a base step.
        joint_norm: whether batch statistics are those of all ranks together.
        adam: steps by Adam in place of SGD, or `None`.
    """

    model: Callable[[], nn.Module] = perceptron
    loss: Callable[[nn.Module, Batch], Tensor] = cross_entropy
    weight: Callable[[Batch], float] = num_samples_of
    num_samples: int = 320
    groups: tuple[Group, ...] = (Group(),)
    gain_per_group: bool = False
    measured_every: int = 1
    max_norm: float | None = None
    trains: Callable[[str, int], bool] = lambda _name, _step: True
    poisoned: frozenset[int] = frozenset()
    average_decay: float | None = None
    joint_norm: bool = False
    adam: Adam | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one rank's backward pass saw.

    Attributes:
        rank: of the worker.
        indices: of the samples.
    """

    rank: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The micro-batches of all ranks in one try at a step.

    Attributes:
        number: of the window, counted with those that were skipped.
        micro_batches: in the order of the ranks.
        nominal_samples: batch that was asked for; another one at the end of an epoch.
    """

    number: int
    micro_batches: tuple[MicroBatch, ...]
    nominal_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a training came to, by either of the two.

    Attributes:
        gains: of each committed step.
        moments: averaged variance and squared norm that each committed step's gain came from;
            `None` where there were none yet.
        batches: samples of each committed step (of this rank alone, in a rank's trace).
        weights: in the end, in one float64 vector.
        start: weights before the first step.
        others: running statistics and averages in the end, by name.
    """

    gains: Sequence[float]
    moments: Sequence[tuple[float, float] | None]
    batches: Sequence[float]
    weights: Tensor
    start: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)
