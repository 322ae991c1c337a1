"""The window at work, as far as every gradient tap knows it: batch, weights, and how it stands.

Knows nothing of how gradients are averaged or measured.
"""

from __future__ import annotations

from elastane.measurement import Measurement
from elastane.peers import Peers

__all__ = ["Window"]


class Window:
    """What `elastane.gradients.GradientTap` and `elastane.sharded.ShardedTap` have in common."""

    _peers: Peers | None = None
    _share: float
    """What the micro-batch's gradient is still to be multiplied by."""
    _norm_weight: float
    """What its squared norm, as it comes, counts in the sum `sum b_i |g_i|^2`."""

    @property
    def is_alone(self) -> bool:
        """Whether the steps are this process's own."""
        return self._peers is None

    @property
    def is_settled(self) -> bool:
        """Whether the mean gradient, or this rank's shard of it, lies in `p.grad`."""
        return self._settled is not None

    @property
    def is_broken(self) -> bool:
        """Whether the group broke in this window."""
        return self._failure is not None

    def note_failure(self, cause: str) -> None:
        """Take the window for broken: `settle` will raise."""
        self._failure = cause

    def begin(self, *, batch_samples: float, measure: bool = True) -> None:
        """Open a window.

        Args:
            batch_samples: `B`, samples of the step over all workers.
            measure: whether to take the moments; flags and extras are reduced in any case.
        """
        self._batch_samples = float(batch_samples)
        self._measure = measure
        self._total_weight = 0.0
        self._num_gradients = 0
        self._failure: str | None = None
        self._settled: Measurement | None = None
        self._begin_micro_batch(0.0, weighted=False)

    def begin_micro_batch(self, weight: float, *, weighted: bool = False) -> None:
        """Announce a micro-batch, or change its weight before its backward.

        Args:
            weight: `b_i`: its samples, or another weight of its mean loss; 0 takes part in the
                communication alone.
            weighted: whether its gradient will come multiplied by `b_i / B`, and not that of the
                mean loss.
        """
        self._begin_micro_batch(float(weight), weighted=weighted)

    def _begin_micro_batch(self, weight: float, *, weighted: bool) -> None:
        batch = self._batch_samples
        self._weight = weight
        self._share = 1.0 if weighted else weight / batch
        self._norm_weight = batch * batch / weight if weighted else weight

    def _count(self) -> None:
        """Count the micro-batch whose backward has ended."""
        self._total_weight += self._weight
        self._num_gradients += self._weight > 0
