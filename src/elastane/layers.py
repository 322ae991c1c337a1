"""Norms of single samples' gradients, in the layers where backward gives them away.

Watches modules with forward hooks for the length of a block. Knows nothing of steps or workers.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from elastane.noise import Moments
from elastane.norms import squared_norm_of_all
from elastane.single import moments_of_layers
from elastane.step_sums import Extra

__all__ = ["LayerNorms"]

_BIASED = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
)


class LayerNorms:
    """Sums the squared norms of all samples' own gradients over the layers that give them away.

    The gradient that reaches a layer's output, times `B`, is that of each sample's own loss. So
    `|g_i|^2` costs no backward of its own for a bias, whose gradient is the sum over the sample's
    positions; for the weight of a linear layer on a matrix, `|output gradient|^2 |input|^2`; and
    for the weight of LayerNorm and RMSNorm, with the input normalised once more.

    The first dimension of input and output must be the samples. Left out is a layer where that
    can't be (another length), that is used twice or shares its parameters, that torch.compile has
    compiled, or whose class is a subclass that may compute something else.

    Args:
        model: bare module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._num_samples = 0
        self._may_watch = False
        self._hooks: list[RemovableHandle] | None = None
        self._shared: frozenset[int] = frozenset()
        self._groups_told: tuple[bool, ...] = ()
        self._used: Counter[nn.Module] = Counter()
        self._found: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the model's layers for the length of a block, from the first `begin` on."""
        self._shared = _shared_parameters(self._model)
        self._may_watch = True
        try:
            yield
        finally:
            self._may_watch = False
            self.rest()

    def rest(self) -> None:
        """Leave the layers alone until the next `begin`: a hook costs each forward of its layer."""
        hooks, self._hooks = self._hooks, None
        for hook in hooks or ():
            hook.remove()

    def _watch(self) -> None:
        if self._hooks is None and self._may_watch:
            kinds = (*_BIASED, nn.RMSNorm)
            layers = [module for module in self._model.modules() if type(module) in kinds]
            self._hooks = [layer.register_forward_hook(self._see) for layer in layers]

    def begin(self, num_samples: int) -> None:
        """Take norms in the next backward over this number of samples; 0 takes none."""
        self._num_samples = num_samples
        if num_samples:
            self._watch()
        self._used.clear()
        self._found.clear()

    @property
    def num_told(self) -> int:
        """How many values `told` returned."""
        return 2 * len(self._groups_told)

    @property
    def can_tell(self) -> bool:
        """Whether there was a layer that told."""
        return any(self._groups_told)

    def told(
        self, groups: Sequence[Sequence[Tensor]], *, loss_scale: Extra, scale_of_gradients: Extra
    ) -> Sequence[Extra]:
        """Return what the backward just made told: for each group `sum |g_i|^2`, then `|g|^2`.

        Both over the parameters of the layers that told. Nobody waits for them.

        Args:
            groups: parameters that have statistics of their own.
            loss_scale: what the loss was multiplied by.
            scale_of_gradients: what `p.grad` is still multiplied by.
        """
        if not self._num_samples:
            self._groups_told = ()
            return ()
        sums = [self._sum_over(group) for group in groups]
        self._groups_told = tuple(one is not None for one in sums)
        scaled = [0.0 if one is None else one[0] / loss_scale**2 for one in sums]
        means = [0.0 if one is None else one[1] / scale_of_gradients**2 for one in sums]
        return (*scaled, *means)

    def moments(self, told: Sequence[float], *, batch_samples: float) -> list[Moments] | None:
        """Return each group's raw moments from the values of `told`, once they are known."""
        half = len(self._groups_told)
        if not all(math.isfinite(value) for value in told):
            return None
        per_sample = zip(self._groups_told, told[:half], strict=True)
        return moments_of_layers(
            [value if is_told else None for is_told, value in per_sample],
            told[half:],
            batch_samples=batch_samples,
        )

    def _sum_over(self, group: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        sums = {
            id(parameter): total
            for module, found in self._found.items()
            if self._used[module] == 1
            for parameter, total in found
            if id(parameter) not in self._shared
        }
        own = [(p.grad, sums[id(p)]) for p in group if id(p) in sums and p.grad is not None]
        if not own:
            return None
        gradients, totals = zip(*own, strict=True)
        return torch.stack(totals).sum(), squared_norm_of_all(gradients)

    def _see(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Forward hook. What torch.compile traces ends at its first line."""
        if torch.compiler.is_compiling() or not self._num_samples:
            return
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        given = inputs[0] if inputs else None
        if not isinstance(given, Tensor) or not (self._is_dealt(given) and self._is_dealt(output)):
            self._used[module] += 2  # it can't be told what of its gradient is whose
            return
        output.register_hook(partial(self._note, module, _remembered(module, given)))

    def _is_dealt(self, tensor: Tensor) -> bool:
        """Whether the rows of a layer's input or output can be the samples."""
        return tensor.dim() > 1 and len(tensor) == self._num_samples

    def _note(
        self, module: nn.Module, recall: Callable[[], Tensor | None], gradient: Tensor
    ) -> None:
        """Backward hook of a layer's output."""
        self._used[module] += 1
        own = _widened(gradient) * self._num_samples
        given = recall()
        found = self._found[module] = []
        for name, norms in _sample_norms(module, own, given).items():
            parameter = getattr(module, name)
            if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
                found.append((parameter, norms.double().sum()))


def _remembered(module: nn.Module, given: Tensor) -> Callable[[], Tensor | None]:
    """Return a way back to a layer's input that makes nothing live longer but small matrices.

    Autograd holds a norm's input too, unless the layer is recomputed in backward.
    """
    if type(module) is nn.Linear and given.dim() == 2:
        kept = given.detach()
        return lambda: kept
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return weakref.ref(given)
    return lambda: None


def _sample_norms(module: nn.Module, own: Tensor, given: Tensor | None) -> Mapping[str, Tensor]:
    """Return by name of parameter the squared norms of the samples' gradients, of shape (B,).

    Args:
        module: the layer.
        own: gradients of the samples' own losses for its output.
        given: its input, or `None` where that is gone.
    """
    norms: dict[str, Tensor] = {}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        shape = module.normalized_shape
        inner = own.reshape(len(own), -1, *shape)  # (B, positions, *shape)
        if isinstance(module, nn.LayerNorm):
            norms["bias"] = inner.sum(1).flatten(1).square().sum(1)
        if given is not None:
            again = _normalised(module, _widened(given)).view_as(inner)
            norms["weight"] = (inner * again).sum(1).flatten(1).square().sum(1)
        return norms
    is_linear = type(module) is nn.Linear
    over = own
    if own.dim() > 2:  # the positions of a sample add up
        over = own.flatten(1, -2).sum(1) if is_linear else own.flatten(2).sum(2)
    norms["bias"] = over.square().sum(1)
    if is_linear and given is not None:
        norms["weight"] = norms["bias"] * _widened(given).square().sum(1)
    return norms


def _normalised(module: nn.LayerNorm | nn.RMSNorm, given: Tensor) -> Tensor:
    shape = list(module.normalized_shape)
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(given, shape, eps=module.eps)
    return F.rms_norm(given, shape, eps=module.eps)


def _widened(tensor: Tensor) -> Tensor:
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().float() if half else tensor.detach()


def _shared_parameters(model: nn.Module) -> frozenset[int]:
    """Return the ids of parameters that several modules have, or one under several names."""
    places = Counter(
        id(parameter)
        for module in model.modules()
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    return frozenset(one for one, count in places.items() if count > 1)
