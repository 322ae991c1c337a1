"""The models whose steps are timed, with data made up for them.

Knows torch alone; nothing of what is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

__all__ = ["SUBJECTS", "Subject"]

_CLASSES = 10
_NUM_SAMPLES = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model and what it is fed with.

    Attributes:
        build: returns the model.
        shape: of a sample.
        batch: samples of a micro-batch.
        vocabulary: where samples are tokens, their number of kinds.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    vocabulary: int = 0

    def dataset(self) -> TensorDataset:
        """Return samples of noise with labels."""
        generator = torch.Generator().manual_seed(0)
        size = (_NUM_SAMPLES, *self.shape)
        if self.vocabulary:
            samples = torch.randint(self.vocabulary, size, generator=generator)
        else:
            samples = torch.randn(size, generator=generator)
        return TensorDataset(samples, torch.randint(_CLASSES, (_NUM_SAMPLES,), generator=generator))


def _perceptron(inputs: int, width: int, *, num_layers: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for number in range(num_layers - 1):
        layers += [nn.Linear(inputs if number == 0 else width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, _CLASSES))


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 54), nn.ReLU(), nn.Linear(54, _CLASSES)),
    )


class _Block(nn.Module):
    """Two convolutions with a way around them."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            *(nn.BatchNorm2d(outputs), nn.ReLU()),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.inner(images) + self.around(images))


def _resnet() -> nn.Module:
    blocks: list[nn.Module] = []
    inputs = 32
    for outputs in (32, 64, 128, 256):
        blocks.append(_Block(inputs, outputs, stride=1 if outputs == inputs else 2))
        blocks.append(_Block(outputs, outputs, stride=1))
        inputs = outputs
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *blocks,
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, _CLASSES)),
    )


class _Transformer(nn.Module):
    """Four encoder layers over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1_000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, _CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


SUBJECTS: Mapping[str, Subject] = {
    "cnn 0.09M": Subject(build=_cnn, shape=(1, 28, 28), batch=32),
    "mlp 0.1M in 82 tensors": Subject(
        build=lambda: _perceptron(49, 49, num_layers=41), shape=(49,), batch=32
    ),
    "resnet 2.8M": Subject(build=_resnet, shape=(3, 32, 32), batch=8),
    "mlp 10M": Subject(build=lambda: _perceptron(784, 2048, num_layers=4), shape=(784,), batch=16),
    "mlp 49M": Subject(build=lambda: _perceptron(784, 3912, num_layers=5), shape=(784,), batch=8),
    "transformer 0.9M": Subject(build=_Transformer, shape=(32,), batch=8, vocabulary=1_000),
}
