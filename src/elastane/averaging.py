"""A moving average of a model's weights whose memory does not depend on the batch.

Knows weights and what a step was worth; nothing of workers, gradients or schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from elastane._compat import foreach_lerp_
from elastane.errors import ArgumentError, StateError, check_choice, describe
from elastane.sharding import shard_of

__all__ = ["AveragedStep", "WeightAverage", "averaging_weight"]

_VERSION = 1


class AveragedStep(Protocol):
    """What is asked of a step's result: `elastane.StepResult` has it."""

    @property
    def position(self) -> int:
        """Committed samples of the stream after the step."""
        ...

    @property
    def progress(self) -> float:
        """Base steps after the step."""
        ...

    @property
    def scale(self) -> float:
        """Base batches in the step."""
        ...

    @property
    def batch_samples(self) -> int:
        """Samples in the step."""
        ...


def averaging_weight(decay: float, *, base_steps: float) -> float:
    """Return the share `1 - decay^k` of the new weights after as much as `k` base steps.

    Args:
        decay: of one base step.
        base_steps: `k`, any number of at least 0; `S` for a step with S base batches.

    Example:
        >>> round(averaging_weight(0.99, base_steps=2), 6)
        0.0199

    References:
        Busbridge et al., How to Scale Your EMA (2023): `rho -> rho^kappa`.
    """
    return 1 - decay**base_steps


class WeightAverage:
    """A moving average of the weights: `a <- d a + (1 - d) w` with `d = decay^S` at scale `S`.

    `decay` is what was tuned for the base batch. The average begins as the weights after the first
    update. Pass it to `Session(stateful={"average": average})`, so that it is in checkpoints and
    equal on workers that join, and call `update` after every step.

    A result that is given twice, or of a step that was skipped, changes nothing; one that was
    missed is made up for by the next, as far as the memory goes.

    Args:
        model: the module that is trained; it is kept by reference.
        decay: of one base step, from 0 to 1.
        per: what the memory is counted in: `"sample"`, or `"progress"`: base steps as the rule
            counts them, where `d = decay^r` under AdaScale.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> average = WeightAverage(model, decay=0.999)
        >>> average.update(None)  # inside a window

    References:
        As `averaging_weight`.
    """

    def __init__(self, model: nn.Module, *, decay: float, per: str = "sample") -> None:
        if not 0 <= decay <= 1:
            rule, way_out = "must lie from 0 to 1", "For example 0.999, of a base step."
            raise ArgumentError(describe("decay", decay, rule=rule, way_out=way_out))
        check_choice("per", per, ("sample", "progress"))
        self._model = model
        self._decay = decay
        self._per = per
        self._position = 0
        self._progress = 0.0
        self.weights: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, result: AveragedStep | None) -> None:
        """Take the weights after a step up.

        Args:
            result: what `session.step()` returned; `None` changes nothing.
        """
        if result is None or result.position <= self._position:
            return
        base_batch_size = result.batch_samples / result.scale
        base_steps = (result.position - self._position) / base_batch_size
        if self._per == "progress":
            base_steps = result.progress - self._progress
        self._position, self._progress = result.position, result.progress
        present = {name: p.detach() for name, p in self._model.named_parameters()}
        known = [name for name in present if name in self.weights]
        self._split_like(present)
        self.weights |= {n: p.clone() for n, p in present.items() if n not in self.weights}
        if known:
            share = averaging_weight(self._decay, base_steps=base_steps)
            foreach_lerp_([self.weights[n] for n in known], [present[n] for n in known], share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the model hold the average for the length of a block, for example to evaluate.

        Buffers, such as the running statistics of BatchNorm, stay those of the model.
        """
        parameters = dict(self._model.named_parameters())
        self._split_like(parameters)
        kept = {name: parameters[name].detach().clone() for name in self.weights}
        try:
            _copy(self.weights, parameters)
            yield
        finally:
            _copy(kept, parameters)

    def _split_like(self, parameters: Mapping[str, Tensor]) -> None:
        """Keep shards of what is whole, where the model has been sharded since."""
        self.weights = {n: shard_of(w, like=parameters[n]) for n, w in self.weights.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the average; its weights load into the bare model with `strict=False`."""
        return {
            "version": _VERSION,
            "position": self._position,
            "progress": self._progress,
            "weights": dict(self.weights),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state.

        Raises:
            StateError: of another version, or of other weights.
        """
        parameters = dict(self._model.named_parameters())
        if state.get("version") != _VERSION:
            raise StateError(f"state of a weight average has version {state.get('version')!r}")
        for name, saved in state["weights"].items():
            if name not in parameters or parameters[name].shape != saved.shape:
                shape = tuple(saved.shape)
                raise StateError(
                    f"the weight average in the state has {name!r} of shape {shape}, and this "
                    "model has not: build the model that it was saved with"
                )
        self.weights = {
            name: shard_of(saved.detach(), like=parameters[name]).to(parameters[name]).clone()
            for name, saved in state["weights"].items()
        }
        self._position, self._progress = int(state["position"]), float(state["progress"])


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)
