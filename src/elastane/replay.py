"""A training part by part and step by step: shown by a worker, and followed by one that comes.

Knows parameters, the optimizer's state and steps; nothing of how parts travel or who takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elastane.making import StepMaker
from elastane.optimizers import AnyOptimizer, members_of
from elastane.schedule import set_lr
from elastane.zero import is_zero

__all__ = ["Replay"]

_PART_BYTES, _MOST_PARTS = 16 << 20, 16

_WORD = 8

Tree = dict[str, Any]


class Replay:
    """Shows parameters with their optimizer state, and steps; or takes up those of another worker.

    A follower that has the first parameters makes their steps with the gradients it is shown, and
    so has the same weights and moments, to the bit, as replicas of one training have. Whatever
    changes weights in another way is found out by `sums`.

    Args:
        model: bare module; its parameters are numbered in its own order.
        optimizer: of them, one or several.
        maker: makes the steps.
    """

    def __init__(self, model: nn.Module, *, optimizer: AnyOptimizer, maker: StepMaker) -> None:
        self._model = model
        self._optimizer = optimizer
        self._maker = maker
        self._spare: dict[int, list[Tensor]] = {}

    @property
    def is_possible(self) -> bool:
        """Whether a step follows from its gradients and the numbers of the optimizer's groups."""
        on_host = all(p.device.type == "cpu" for p in self._model.parameters())
        zero = any(is_zero(one) for one in members_of(self._optimizer))
        return on_host and not zero and self._maker.can_be_repeated

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters alone."""
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def parts(self) -> list[range]:
        """Return parts of the parameters' numbers: of some 16 MB, or as much as makes 16 of them.

        A parameter is in one part, however large it is.
        """
        found: list[range] = []
        most = max(_PART_BYTES, self.num_bytes // _MOST_PARTS)
        begin = size = 0
        for number, parameter in enumerate(self._model.parameters()):
            if size and size + parameter.nbytes > most:
                found.append(range(begin, number))
                begin, size = number, 0
            size += parameter.nbytes
        return [*found, range(begin, len(list(self._model.parameters())))]

    def watch(self, on_step: Callable[[Sequence[float]], None] | None) -> None:
        """Have each step call this right before it is made, with its momentum factors."""
        self._maker.on_step = on_step

    def part(self, some: range) -> Tree:
        """Return a copy of some parameters and of the optimizer's state of them."""
        parameters = list(self._model.parameters())[some.start : some.stop]
        states = self._states()
        return {
            "numbers": [some.start, some.stop],
            "parameters": [parameter.detach().clone() for parameter in parameters],
            "states": [_values(states.get(parameter, {})) for parameter in parameters],
        }

    def take_part(self, tree: Mapping[str, Any]) -> None:
        """Have another worker's `part`."""
        start, stop = tree["numbers"]
        parameters = list(self._model.parameters())[start:stop]
        pairs = zip(parameters, tree["parameters"], tree["states"], strict=True)
        owners = self._owners()
        for parameter, values, state in pairs:
            with torch.no_grad():
                parameter.copy_(values)
            if state:
                laid_out = {name: _like(parameter, value) for name, value in state.items()}
                owners[parameter].state[parameter] = laid_out

    def step(self, count: int, buffer_factors: Sequence[float]) -> Tree:
        """Return the step at hand, of the first parameters: gradients and the groups' numbers."""
        some = list(self._model.parameters())[:count]
        gradients = {n: p.grad for n, p in enumerate(some) if p.grad is not None}
        return {
            "count": count,
            "with_gradient": list(gradients),
            "gradients": [self._copied(number, one) for number, one in gradients.items()],
            "groups": [_values(group) for group in self._optimizer.param_groups],
            "buffer_factors": list(buffer_factors),
        }

    def have_back(self, step: Mapping[str, Any]) -> None:
        """Use the memory of a `step` that nobody needs any longer for later ones."""
        for number, gradient in zip(step["with_gradient"], step["gradients"], strict=True):
            self._spare.setdefault(number, []).append(gradient)

    def take_step(self, tree: Mapping[str, Any]) -> None:
        """Make another worker's `step` with the parameters that are here already."""
        parameters = list(self._model.parameters())
        for parameter in parameters:
            parameter.grad = None
        for number, gradient in zip(tree["with_gradient"], tree["gradients"], strict=True):
            parameters[number].grad = _like(parameters[number], gradient)
        for group, numbers in zip(self._optimizer.param_groups, tree["groups"], strict=True):
            _set_numbers(group, numbers)
        self._maker.repeat(tree["buffer_factors"])

    def sums(self, some: range) -> list[int]:
        """Return sums of the bits of some parameters and of their state: equal if these are."""
        states = self._states()
        found: list[int] = []
        for parameter in list(self._model.parameters())[some.start : some.stop]:
            own = states.get(parameter, {})
            tensors = [parameter, *(own[name] for name in sorted(own))]
            found += [_sum_of_bits(one) for one in tensors if isinstance(one, Tensor)]
        return found

    def _copied(self, number: int, gradient: Tensor) -> Tensor:
        spare = self._spare.get(number)
        if not spare:
            return gradient.clone()
        copy = spare.pop()
        fits = copy.dtype == gradient.dtype and copy.stride() == gradient.stride()
        return copy.copy_(gradient) if fits else gradient.clone()

    def _owners(self) -> dict[Tensor, torch.optim.Optimizer]:
        return {
            parameter: one
            for one in members_of(self._optimizer)
            for group in one.param_groups
            for parameter in group["params"]
        }

    def _states(self) -> dict[Tensor, Mapping[str, Any]]:
        owners = self._owners().items()
        return {
            parameter: one.state[parameter] for parameter, one in owners if parameter in one.state
        }


def _values(of: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of a parameter's state, or of the numbers of a group."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in of.items()
        if name != "params"
    }


def _like(parameter: Tensor, value: Any) -> Any:
    """Return a tensor of a parameter's shape laid out as the parameter is; else what it is."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _set_numbers(group: dict[str, Any], numbers: Mapping[str, Any]) -> None:
    for name, value in numbers.items():
        if name == "lr":
            set_lr(group, value)
        else:
            group[name] = value


def _sum_of_bits(tensor: Tensor) -> int:
    """Return the sum of a tensor's words of 64 bits, and of the bytes behind the last one."""
    read = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(read) // _WORD * _WORD
    if read.data_ptr() % _WORD or read.storage_offset() % _WORD:
        read = read.clone()
    words, rest = read[:whole].view(torch.int64), read[whole:]
    return int(words.sum()) + int(rest.sum(dtype=torch.int64))
