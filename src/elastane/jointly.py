"""SyncBatchNorm under unequal batches: the workers' gradients are weighted before it mixes them.

Knows modules and autograd; what a micro-batch weighs, others tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["communicates_in_forward", "weighted_joint_norms"]

_NAME = "SyncBatchNorm"


def communicates_in_forward(model: nn.Module) -> bool:
    """Return whether a forward pass waits for the other workers, as SyncBatchNorm's does.

    Other libraries have layers of the same kind that are none of torch's; they are known by name.
    """
    return any(_is_joint(module) for module in model.modules())


def _is_joint(module: nn.Module) -> bool:
    return any(kind.__name__.endswith(_NAME) for kind in type(module).__mro__)


class _ScaledGradient(torch.autograd.Function):
    """Hand a tensor on, and its gradient back times a factor that is asked for in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: Callable[[], float]) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        return grads[0] * ctx.factor(), None


@contextmanager
def weighted_joint_norms(model: nn.Module, *, share: Callable[[], float]) -> Iterator[None]:
    """Have SyncBatchNorm mix gradients of the batch's mean loss, for the length of a block.

    Its backward adds up over the workers what each one's own mean loss asks for, as if all their
    batches were equal. With shares `c_i`, the weight of worker i's micro-batch over the mean
    weight, the gradient is multiplied by `c_i` where it enters the layer and divided by it where
    it leaves, so that what is averaged with these weights afterwards is the gradient of
    `sum c_i L_i`.

    Args:
        model: bare module.
        share: `c_i` of the micro-batch whose backward is running, above 0.
    """
    with ExitStack() as stack:
        for layer in model.modules():
            if _is_joint(layer):
                _weigh(layer, share=share, stack=stack)
        yield


def _weigh(layer: nn.Module, *, share: Callable[[], float], stack: ExitStack) -> None:
    """Hook a layer's input and output, and its own parameters as soon as they are trained."""
    inverse = partial(_inverse, share)
    hooked: set[int] = set()

    def entered(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for parameter in layer.parameters():
            if parameter.requires_grad and id(parameter) not in hooked:
                hooked.add(id(parameter))
                stack.callback(parameter.register_hook(lambda grad: grad * inverse()).remove)
        return (_scaled(inputs[0], inverse), *inputs[1:])

    def left(_layer: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return _scaled(output, share)

    stack.callback(layer.register_forward_pre_hook(entered).remove)
    stack.callback(layer.register_forward_hook(left).remove)


def _scaled(tensor: Tensor, factor: Callable[[], float]) -> Tensor:
    scaled: Any = _ScaledGradient.apply(tensor, factor)
    return scaled


def _inverse(share: Callable[[], float]) -> float:
    return 1 / share()
