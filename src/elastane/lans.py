"""LANS: LAMB with normalised gradients and Nesterov's momentum, which no well-kept library has.

An ordinary torch optimizer; knows nothing of sessions, rules or workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastane.errors import ArgumentError, UnsupportedError, check_positive, describe

__all__ = ["LANS", "block_update"]


def block_update(direction: Tensor, parameter: Tensor, *, weight_decay: float) -> Tensor:
    r"""Return a direction with decay, rescaled to the length of the parameter it is to change.

    `|x| / |d + lambda x| (d + lambda x)`; as it is where one of the two norms is 0.

    Args:
        direction: `d`, of the parameter's shape.
        parameter: `x`.
        weight_decay: `lambda`.
    """
    decayed = direction.add(parameter, alpha=weight_decay)
    length, own = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(decayed)
    ratio = torch.where((length > 0) & (own > 0), length / own, torch.ones_like(own))
    return decayed * ratio


class LANS(Optimizer):
    r"""Step each parameter by its own length, in the mean of two directions.

    With `g~ = g / |g|`, and Adam's two averages `m`, `v` of `g~` and its square, both divided by
    `1 - beta^t`::

        x <- x - lr (beta1 B(m / (sqrt v + eps)) + (1 - beta1) B(g~ / (sqrt v + eps)))

    where `B` is `block_update`. Each parameter is a block. A gradient of zeros stays one, where a
    division by its norm would give NaN.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, above 0.
        betas: of the two averages, from 0 to below 1.
        eps: above 0.
        weight_decay: `lambda`, at least 0.

    Raises:
        ArgumentError: a value that breaks a rule.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = LANS([weight], lr=0.1, eps=1e-12, weight_decay=0.0)
        >>> weight.grad = torch.tensor([0.0, 2.0])
        >>> optimizer.step()
        >>> [round(one, 4) for one in weight.tolist()]
        [3.0, 3.5]

    References:
        Zheng, Lin, Zha, Li: Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes
        (arXiv 2006.13484, 2020), algorithm 2, with the identity for phi.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        check_positive("lr", lr, way_out="For example 1e-3.")
        check_positive("eps", eps, way_out="For example 1e-6.")
        for beta in betas:
            if not 0 <= beta < 1:
                rule = "must each be at least 0 and below 1"
                way_out = "For example (0.9, 0.999)."
                raise ArgumentError(describe("betas", betas, rule=rule, way_out=way_out))
        if weight_decay < 0:
            message = describe(
                "weight_decay", weight_decay, rule="must be at least 0", way_out="0 has none."
            )
            raise ArgumentError(message)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Make a step; return what the closure returned."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return result

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse:
            raise UnsupportedError("LANS has no sparse gradients: build the layer without sparse")
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        first, second = group["betas"]
        norm = torch.linalg.vector_norm(gradient)
        unit = gradient / torch.where(norm > 0, norm, torch.ones_like(norm))
        mean = state["exp_avg"].lerp_(unit, 1 - first)
        square = state["exp_avg_sq"].lerp_(unit.square(), 1 - second)
        spread = (square / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        by_mean = mean / (1 - first ** state["step"]) / spread
        decay = group["weight_decay"]
        update = block_update(by_mean, parameter, weight_decay=decay) * first
        update += block_update(unit / spread, parameter, weight_decay=decay) * (1 - first)
        parameter.sub_(update * group["lr"])
