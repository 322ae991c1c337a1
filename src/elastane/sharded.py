"""The gradient tap of a model that its user sharded: FSDP2 and HSDP, measured unit by unit.

Knows shards, and what their group is; nothing of rules, data or schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from elastane._compat import foreach_mul_
from elastane.errors import CommunicationError, UnsupportedError, UsageError
from elastane.measurement import Measurement, read_measurement
from elastane.norms import squared_norm, squared_norm_of_all
from elastane.peers import Peers
from elastane.sharded_unit import Unit
from elastane.sharding import Sharding, local_of, units_of
from elastane.step_sums import Extra, as_vector
from elastane.window import Window

__all__ = ["ShardedTap"]


class ShardedTap(Window):
    """Turns micro-batch gradients into shards of `sum b_i g_i / B` and their squared norms.

    Called like `elastane.gradients.GradientTap`. FSDP hands each unit's whole local gradient to
    the reduce-scatter, and there alone it can be seen: its norm is taken there, it is weighted by
    `b_i / B`, and sums take the place of FSDP's means. Every micro-batch is reduced, and FSDP adds
    the shards up, so each counts as a gradient of its own; no whole gradient is kept. All workers
    must make the same number of backward passes.

    At the end of a window the shards of the mean gradient are measured. One small float64 SUM
    reduction over all workers carries the statistics of both kinds; only the first copy of the
    model adds its shards' norms.

    Where other copies of the model are trained beside this one, by workers that may be lost, the
    shards of the means are summed over those that hold the same ones first, once a step. All that
    hold one copy must know whether the step is whole before any of them commits it.

    Args:
        groups: parameters of each group that has statistics of its own; those of one unit must
            be in one group.
        extras: called once a step when the small reduction is made; returns as many values as
            every other rank's.
        arrived: called once a step before this rank waits for others.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        *,
        extras: Callable[[], Sequence[Extra]] | None = None,
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        self._extras, self._arrived = extras, arrived
        self._agree: Callable[[bool], bool] = bool
        self._counts_means = True
        self._units: list[Unit] = []
        self.set_groups(groups)
        self.begin(batch_samples=1.0)

    def set_groups(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Replace the groups, for parameters that joined the optimizer."""
        self._parameters = [list(dict.fromkeys(group)) for group in groups]
        self.find_groups()

    def find_groups(self) -> None:
        """Find each unit's group anew, for parameters that were frozen or unfrozen.

        Raises:
            UnsupportedError: a unit's parameters are in several groups, or in none.
        """
        for unit in self._units:
            unit.find_group(self._parameters)

    def attach(
        self,
        model: nn.Module,
        *,
        sharding: Sharding,
        peers: Peers | None,
        is_first_copy: bool = True,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """Sum and measure a model's gradients from now on.

        Args:
            model: sharded.
            sharding: how.
            peers: all workers; `None` for one.
            is_first_copy: whether this copy's shards are the ones to measure the mean by.
            agree: called once a step with whether the step is whole on this rank; returns whether
                it is on all ranks that hold this copy.

        Raises:
            UnsupportedError: a unit that can't be measured.
        """
        self._peers = peers
        self._agree = agree
        self._counts_means = is_first_copy and sharding.replica == 0
        self._units = [
            Unit(self, name, parameters, sharding=sharding)
            for name, _, parameters in units_of(model)
        ]
        self.find_groups()
        for unit, (_, module, _) in zip(self._units, units_of(model), strict=True):
            unit.enter(module)

    def detach(self) -> None:
        """Leave the units to FSDP's own means; its setters have no way back to its defaults."""
        for unit in self._units:
            unit.leave()
        self._peers, self._units, self._agree = None, [], bool
        self.begin(batch_samples=1.0)

    def begin(self, *, batch_samples: float, measure: bool = True) -> None:
        """Open a window (see `elastane.window.Window.begin`)."""
        super().begin(batch_samples=batch_samples, measure=measure)
        self._local: list[tuple[int, Tensor]] = []
        self._reduced: set[Unit] = set()
        self._reduced_twice = ""

    def set_aside(self) -> None:
        """End an inner micro-batch, whose gradient has been added to `p.grad` already.

        Raises:
            UsageError: there was no backward since the last call.
        """
        self._end_micro_batch()

    def settle(self, *, loss_scale: Extra = 1.0) -> Measurement:
        """Finish the window: measure the mean gradient, whose shard lies in `p.grad`.

        Args:
            loss_scale: what the loss was multiplied by before backward.

        Raises:
            UsageError: there was no backward in the last micro-batch.
            UnsupportedError: a unit's gradient came in parts.
            CommunicationError: the group broke.
        """
        if self._settled is None:
            self._end_micro_batch()
            self._settled = self._read(loss_scale)
        return self._settled

    def _end_micro_batch(self) -> None:
        if self._failure is not None:
            raise CommunicationError(_BROKEN.format(cause=self._failure))
        if self._reduced_twice:
            raise UnsupportedError(_IN_PARTS.format(unit=self._reduced_twice))
        if not self._reduced:
            raise UsageError(_NO_BACKWARD)
        self._reduced.clear()
        self._count()

    def take(self, unit: Unit, gradient: Tensor) -> None:
        """Measure a unit's whole local gradient, and give it its weight in the mean."""
        if unit in self._reduced:
            self._reduced_twice = unit.name
        self._reduced.add(unit)
        if self._weight == 0:
            gradient.zero_()
            return
        if self._measure:
            self._local.append((unit.group, squared_norm(gradient) * self._norm_weight))
        if self._share != 1:
            gradient.mul_(self._share)

    @torch.no_grad()
    def _read(self, loss_scale: Extra) -> Measurement:
        gradients = [
            [local_of(p.grad) for p in group if p.grad is not None] for group in self._parameters
        ]
        *values, scale = self._reduced_values(gradients, loss_scale)
        measurement = read_measurement(
            values[: -len(gradients)],
            values[-len(gradients) :],
            batch_samples=self._batch_samples,
            loss_scale=scale,
            measured=self._measure,
        )
        if 0 < measurement.weight != self._batch_samples:
            every = [one for group in gradients for one in group]
            foreach_mul_(every, self._batch_samples / measurement.weight)
        return measurement

    def _reduced_values(
        self, gradients: Sequence[Sequence[Tensor]], loss_scale: Extra
    ) -> list[float]:
        """Return the step's sums over all workers, and the loss scale.

        Raises:
            CommunicationError: for all ranks that hold this copy, if the group broke for one.
        """
        extras = tuple(self._extras()) if self._extras else ()
        self._arrived()  # before a wait for anybody
        device = next(one for group in gradients for one in group).device
        values: list[float] = []
        try:
            if self._peers is not None and self._peers.replicas is not None:
                self._peers.replicas.sum_all([one for group in gradients for one in group])
            vector = self._told(gradients, extras, device)
            if self._peers is not None:
                self._peers.sum(vector)
            values = torch.cat([vector, as_vector([loss_scale], device)]).tolist()
        except CommunicationError as error:
            self.note_failure(str(error))
        if not self._agree(not self.is_broken) or self._failure is not None:
            self.note_failure(self._failure or "it broke for another rank of this copy")
            raise CommunicationError(_BROKEN.format(cause=self._failure))
        return values

    def _told(
        self, gradients: Sequence[Sequence[Tensor]], extras: Sequence[Extra], device: torch.device
    ) -> Tensor:
        """Return what this rank adds to the step's sums: what `read_measurement` reads."""
        num_groups = len(gradients)
        local = torch.zeros(num_groups, dtype=torch.float64, device=device)
        for group, norm in self._local:
            local[group] += norm
        finite = local.isfinite().all()
        local = torch.where(finite, local, torch.zeros_like(local))
        told = (self._total_weight, self._num_gradients, ~finite, *extras)
        means = torch.zeros(num_groups, dtype=torch.float64, device=device)
        if self._counts_means:
            for number, group in enumerate(gradients):
                means[number] = squared_norm_of_all(group) if group else 0.0
        return torch.cat([local, as_vector(told, device), means])


_BROKEN = (
    "the process group broke in this step, which this worker has not committed: {cause}. A sharded "
    "model can't go on without a rank of its own: start again from a checkpoint, or have several "
    "copies with `elastane run --group-size`"
)
_NO_BACKWARD = (
    "step() without a gradient: call session.backward(loss) or loss.backward() on a loss computed "
    "with session.model before each step()"
)
_IN_PARTS = (
    "{unit} was reduced twice in one micro-batch, so its gradient can't be measured: add up the "
    "losses and call backward once before each step()"
)
