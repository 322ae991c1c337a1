"""The gradient tap: averages a step's gradients by samples and measures them on the way.

One process or DDP, any number of micro-batches. Knows nothing of rules, data, schedules or
generations; what others want summed over the workers rides along as opaque extra values.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from elastane._compat import GradBucket, foreach_add_, foreach_mul_, foreach_zero_
from elastane.carrier import Carrier
from elastane.errors import CommunicationError, UnsupportedError, UsageError
from elastane.group_norms import GroupNorms, views_of
from elastane.measurement import Measurement, read_measurement
from elastane.norms import Run
from elastane.peers import Peers
from elastane.square_sums import SquareSums
from elastane.step_sums import Extra, StepSums
from elastane.window import Window

__all__ = ["GradientTap"]


class GradientTap(Window):
    r"""Turns micro-batch gradients into `sum b_i g_i / B` and their squared norms.

    A window is one optimizer step. For each micro-batch of this worker: `begin_micro_batch`,
    forward and backward by the user, then `set_aside` (all but the last). After the last
    backward, `settle` leaves the batch's mean gradient in `p.grad` and returns the measurement.

    Within one process the micro-gradients are taken out of `p.grad`, measured and summed with
    their weights. Under DDP the last micro-batch's gradient is measured in the communication
    hook, the weighted sum of the others is added to the bucket, and the buckets are SUM-reduced:
    an average over samples, also with unequal workers. One small float64 SUM reduction a step,
    launched behind the last bucket, carries the statistics, a count of ranks with gradients that
    are not finite, and the extra values. All of this is known when the
    last bucket goes, and in a step that is not measured when the first does: that bucket carries
    it along if it is small and of float32 or float64, as a reduction of its own costs more than
    the rest of what is done here.

    No communication error is raised inside the user's backward: the hook hands the local bucket
    back and `settle` raises.

    Args:
        groups: parameters of each group that has statistics of its own.
        extras: called once a step when the small reduction is launched; returns as many values
            as every other rank's.
        arrived: called once a step when this rank has launched its last reduction.
        squares: whether to keep `sum b_i g_i^2` of each element, too, summed over the workers by
            a reduction as large as the gradients.

    References:
        The unequal-sample estimator is described in `elastane.noise.estimate_moments`.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        *,
        extras: Callable[[], Sequence[Extra]] | None = None,
        arrived: Callable[[], None] = lambda: None,
        squares: bool = False,
    ) -> None:
        self._extras, self._arrived, self._has_squares = extras, arrived, squares
        self._carrier = Carrier()
        self._averaged: Sequence[Tensor] = ()
        self._finds_unused = self._has_bucket_views = False
        self.set_groups(groups)
        self.begin(batch_samples=1.0)

    def set_groups(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Replace the groups, for parameters that joined the optimizer."""
        self._parameters = [list(dict.fromkeys(group)) for group in groups]
        self._every = [parameter for group in self._parameters for parameter in group]
        self._norms = GroupNorms(self._parameters)
        self._norms.expect(self._averaged)
        self._squares = SquareSums(self._every) if self._has_squares else None

    def precondition(self, factors: Mapping[int, Tensor]) -> None:
        """Measure gradients times these factors (see `GroupNorms.precondition`)."""
        self._norms.precondition(factors)

    def square_sums(self) -> Mapping[int, Tensor]:
        """Return the settled window's `sum b_i g_i^2` of each element, by the parameters' ids."""
        assert self._squares is not None
        return self._squares.sums

    def attach(self, replica: DistributedDataParallel, *, peers: Peers) -> None:
        """Average the replica's gradients from now on. DDP has no way to detach a hook.

        Args:
            replica: a wrapper that was made on the peers' group and has no hook yet.
            peers: the data-parallel workers.
        """
        self._peers = peers
        self._finds_unused = replica.find_unused_parameters
        self._has_bucket_views = replica.gradient_as_bucket_view
        self._averaged = list(replica.parameters())
        self._norms.expect(self._averaged)
        replica.register_comm_hook(self, _average_bucket)

    def detach(self) -> None:
        """Forget the process group; the next steps are this process's own."""
        self._peers = None
        self._carrier = Carrier()  # an operation that was given up may still write to it
        self._squares = SquareSums(self._every) if self._has_squares else None
        self._averaged = ()
        self._finds_unused = self._has_bucket_views = False
        self.begin(batch_samples=1.0)

    @property
    def has_set_aside(self) -> bool:
        """Whether gradients of inner micro-batches wait for the last one."""
        return bool(self._set_aside)

    def begin(self, *, batch_samples: float, measure: bool = True) -> None:
        """Open a window (see `elastane.window.Window.begin`)."""
        super().begin(batch_samples=batch_samples, measure=measure)
        self._set_aside: dict[int, Tensor] = {}
        self._sums = StepSums(len(self._parameters))
        self._small: tuple[Tensor, dist.Work | None] | None = None
        self._waits: list[dist.Work] = []
        self._unread: list[Callable[[], None]] = []
        if self._squares is not None:
            self._squares.clear()
        self._carrier.unload()
        self._reduced_twice = False

    def begin_micro_batch(self, weight: float, *, weighted: bool = False) -> None:
        """Announce a micro-batch (see `elastane.window.Window.begin_micro_batch`).

        One whose gradient comes weighted is added to what was set aside by backward itself, if
        nobody needs to see it alone: that spares a second copy of all gradients.
        """
        super().begin_micro_batch(weight, weighted=weighted)
        if weighted and self._set_aside and not self._measure and self._squares is None:
            for parameter in self._every:
                if id(parameter) in self._set_aside:
                    parameter.grad = self._set_aside.pop(id(parameter))

    def set_aside(self) -> None:
        """Take the gradient of an inner micro-batch out of `p.grad` and keep it, weighted.

        Raises:
            UsageError: there was no backward since the last call.
        """
        gradients = self._gradients()
        for parameter in self._every:
            parameter.grad = None
        self._count_local(gradients)
        if self._weight:
            self._keep(gradients)
        if self._finds_unused:
            # DDP wants a gradient for all that was used since it last averaged.
            for parameter in self._every:
                if id(parameter) in gradients:
                    parameter.grad = torch.zeros_like(gradients[id(parameter)])

    def _keep(self, gradients: dict[int, Tensor]) -> None:
        share = self._share
        new = [one for one in gradients if one not in self._set_aside]
        old = [one for one in gradients if one in self._set_aside]
        if self._has_bucket_views:  # which the next backward would overwrite
            gradients.update((p, gradients[p].clone()) for p in new if gradients[p]._is_view())
        if new:
            if share != 1:
                foreach_mul_([gradients[one] for one in new], share)
            self._set_aside.update((one, gradients[one]) for one in new)
        if old:
            kept = [self._set_aside[one] for one in old]
            foreach_add_(kept, [gradients[one] for one in old], alpha=share)

    def settle(self, *, loss_scale: Extra = 1.0) -> Measurement:
        """Finish the window: leave the mean gradient in `p.grad` and return the measurement.

        The one place that waits: for one small vector. Calls after the first return the same.

        Args:
            loss_scale: what the loss was multiplied by before backward.

        Raises:
            UsageError: there was no backward in the last micro-batch, or more than one.
            CommunicationError: the group broke; the gradients are this worker's alone.
        """
        if self._reduced_twice:
            raise UsageError(_TWO_BACKWARDS)
        if self._settled is None:
            if self._peers is None:
                self._merge_own()
            elif self._small is None and self._failure is None:
                raise UsageError(self._describe_missing())
            self._settled = self._read(loss_scale)
        return self._settled

    def _merge_own(self) -> None:
        gradients = self._gradients()
        self._count_local(gradients)
        if self._share == 0:
            foreach_zero_(list(gradients.values()))
        elif self._share != 1:
            foreach_mul_(list(gradients.values()), self._share)
        if self._set_aside:
            self._add_to(gradients)
        sqr_norms = self._norms.mean(gradients)
        self._sums.set_mean(0, sqr_norms)
        self._launch_small(sqr_norms.device)

    def _add_to(self, gradients: dict[int, Tensor]) -> None:
        """Add what was set aside to the last micro-batch's gradients."""
        both = [one for one in gradients if one in self._set_aside]
        kept = [self._set_aside.pop(one) for one in both]
        foreach_add_([gradients[one] for one in both], kept)
        for parameter in self._every:
            if id(parameter) in self._set_aside:
                parameter.grad = self._set_aside[id(parameter)]
        gradients |= self._set_aside
        self._set_aside.clear()

    def _gradients(self) -> dict[int, Tensor]:
        """Return the gradients in `p.grad`, by the parameters' ids: a tensor's hash is slow."""
        gradients: dict[int, Tensor] = {}
        for parameter in self._every:
            gradient = parameter.grad
            if gradient is not None:
                if gradient.is_sparse:
                    raise UnsupportedError(_SPARSE)
                gradients[id(parameter)] = gradient
        if not gradients:
            raise UsageError(_NO_BACKWARD)
        return gradients

    def _count_local(self, gradients: dict[int, Tensor]) -> None:
        self._count()
        if self._measure and self._weight:
            self._sums.add_local(self._norms.local(gradients), factor=self._norm_weight)
        if self._squares is not None and self._weight:
            self._squares.add(gradients, factor=self._norm_weight)

    def _describe_missing(self) -> str:
        """Return why DDP did not average: no backward, or one that missed parameters."""
        every = [p for p in self._every if p.requires_grad]
        missed = [p for p in every if p.grad is None]
        if len(missed) == len(every):
            return _NO_BACKWARD
        if not missed:
            return _NOT_AVERAGED
        shapes = ", ".join(str(tuple(p.shape)) for p in missed[:4])
        return (
            f"backward did not reach {len(missed)} of {len(every)} parameters (shapes {shapes}), "
            "and DDP waits for them: compute the loss with session.model, and if parameters are "
            "unused by design pass ddp={'find_unused_parameters': True} or freeze them"
        )

    def _reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        runs, views = self._norms.runs_of(bucket, length=len(buffer)), self._views_of(bucket)
        self._reduced_twice |= self._small is not None
        if self._weight:
            if self._measure:
                self._sums.add_local(
                    self._norms.local_of(buffer, runs, views), factor=self._norm_weight
                )
            if self._squares is not None:
                self._squares.add(views, factor=self._norm_weight)
            if self._share != 1:
                buffer.mul_(self._share)
        else:
            buffer.zero_()
        if self._set_aside:
            self._add_set_aside(bucket)
        mean, carrier = buffer, self._carrier
        is_known = bucket.is_last() if self._measure else bucket.index() == 0
        if is_known and carrier.takes(buffer):
            weight = self._total_weight + self._weight
            count = self._num_gradients + (self._weight > 0)
            buffer = carrier.load(buffer, self._vector(weight, count, buffer.device))
            mean = carrier.gradients
        measured = partial(self._measure_mean, bucket.index(), mean, runs, views)
        future = self._all_reduce(buffer, then=measured)
        if bucket.is_last():
            self._count()
            self._launch_squares()
            if carrier.vector is None:
                self._launch_small(buffer.device)
            else:
                self._small = (carrier.vector, None)
                self._arrived()
        return future

    def _views_of(self, bucket: GradBucket) -> Mapping[int, Tensor]:
        """Return a bucket's gradients if anybody needs them one by one."""
        if self._squares is None and not self._norms.preconditions:
            return {}
        return views_of(bucket)

    def _add_set_aside(self, bucket: GradBucket) -> None:
        pairs = [
            (view, kept)
            for view, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True)
            if (kept := self._set_aside.pop(id(parameter), None)) is not None
        ]
        if pairs:
            views, kept = zip(*pairs, strict=True)
            foreach_add_(list(views), list(kept))

    def _all_reduce(
        self, buffer: Tensor, *, then: Callable[[str | None], Tensor]
    ) -> torch.futures.Future[Tensor]:
        work = self._start_sum(buffer)
        if work is not None and self._peers is not None:
            return self._peers.breaker.watch(work, then, on_host=not buffer.is_cuda)
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        future.set_result(then(self._failure))
        return future

    def _start_sum(self, tensor: Tensor) -> dist.Work | None:
        """Start a SUM reduction, or note why there can be none."""
        if self._failure is None and self._peers is not None:
            try:
                work = dist.all_reduce(tensor, group=self._peers.group, async_op=True)
                if work is not None:
                    return work
                self._failure = "this process is no member of its group"
            except RuntimeError as error:
                self._failure = str(error)
        return None

    def _measure_mean(
        self,
        index: int,
        buffer: Tensor,
        runs: Sequence[Run],
        views: Mapping[int, Tensor],
        failure: str | None,
    ) -> Tensor:
        def read() -> None:
            self._sums.set_mean(index, self._norms.mean_of(buffer, runs, views))

        if failure is not None:
            self._failure = failure
        elif len(buffer) > _SHORT or self._has_bucket_views:
            read()
        else:
            self._unread.append(read)
        return buffer

    def _launch_squares(self) -> None:
        """Start the sum of squares, if they are kept."""
        if self._squares is not None:
            work = self._squares.reduce(self._start_sum)
            self._waits += [] if work is None else [work]

    def _launch_small(self, device: torch.device) -> None:
        """Start the step's small SUM reduction: statistics, count, flag, extras."""
        vector = self._vector(self._total_weight, self._num_gradients, device)
        self._arrived()
        work = None if self._peers is None else self._start_sum(vector)
        self._small = (vector, work)

    def _vector(self, weight: float, num_gradients: int, device: torch.device) -> Tensor:
        extras = tuple(self._extras()) if self._extras else ()
        return self._sums.vector((weight, float(num_gradients)), extras, device=device)

    def _read(self, loss_scale: Extra) -> Measurement:
        vector, work = self._small or (torch.zeros(0), None)
        for one in (*self._waits, work):
            if one is not None and self._failure is None and self._peers is not None:
                self._failure = self._peers.breaker.outcome(one, on_host=not vector.is_cuda)
        if self._failure is not None:
            raise CommunicationError(_BROKEN.format(cause=self._failure))
        for read in self._unread:
            read()
        self._unread = []
        reduced, means, known_scale = self._sums.read(vector, loss_scale)
        groups = len(self._parameters)
        measurement = read_measurement(
            reduced,
            means[:groups],
            compared_sqr_norms=means[groups:],
            batch_samples=self._batch_samples,
            loss_scale=known_scale,
            measured=self._measure,
        )
        if 0 < measurement.weight != self._batch_samples:
            grads = [p.grad for p in self._every if p.grad is not None]
            foreach_mul_(grads, self._batch_samples / measurement.weight)
        return measurement


def _average_bucket(tap: GradientTap, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook; it wants its second parameter to be called `bucket`."""
    return tap._reduce_bucket(bucket)


_SHORT = 1 << 19
"""Elements of a bucket that is not worth another thread's work while the next ones travel."""

_BROKEN = (
    "the process group broke in this step, which this worker has not committed: {cause}. Usually "
    "another worker failed (look at its log), left the loop by `break` (session.stop() stops all) "
    "or called session.evaluate() alone"
)
_NO_BACKWARD = (
    "step() without a gradient: no parameter of the optimizer has one; call session.backward(loss) "
    "or loss.backward() on a loss computed with session.model before each step()"
)
_NOT_AVERAGED = (
    "DDP did not average this micro-batch: compute the loss with session.model, not with your own "
    "module; a parameter outside the optimizer that is not used must be frozen, or pass "
    "ddp={'find_unused_parameters': True}"
)
_TWO_BACKWARDS = (
    "two backward passes in one micro-batch: DDP averages at each, so add up the losses and call "
    "backward once before each step()"
)
_SPARSE = (
    "sparse gradients are not supported: build the embedding with sparse=False, "
    "or leave its parameters out of the optimizer"
)
