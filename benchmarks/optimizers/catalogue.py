"""The optimizers that people use, by name, each with a learning rate that suits the digits.

Knows where they come from and how they are built; nothing of sessions or rules.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["CATALOGUE", "Kind", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An optimizer.

    Attributes:
        module: where its class is.
        name: of the class.
        lr: chosen by hand for the base batch, of 1e-3, 3e-3, ... 3.
        options: further arguments.
        matrices_only: whether it takes matrices alone; other parameters are frozen then.
    """

    module: str
    name: str
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict)
    matrices_only: bool = False

    def build(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of a model's parameters."""
        parameters: Iterable[nn.Parameter] = model.parameters()
        if self.matrices_only:
            for parameter in model.parameters():
                parameter.requires_grad_(parameter.dim() == 2)
            parameters = [p for p in model.parameters() if p.requires_grad]
        kind: Callable[..., Optimizer] = getattr(importlib.import_module(self.module), self.name)
        return kind(parameters, lr=self.lr, **self.options)


def _torch(name: str, lr: float, **options: Any) -> Kind:
    return Kind(module="torch.optim", name=name, lr=lr, options=options)


def _extra(name: str, lr: float, **options: Any) -> Kind:
    return Kind(module="pytorch_optimizer", name=name, lr=lr, options=options)


CATALOGUE: Mapping[str, Kind] = {
    "SGD": _torch("SGD", 0.1),
    "SGD, momentum": _torch("SGD", 0.03, momentum=0.9),
    "Adam": _torch("Adam", 0.003),
    "AdamW": _torch("AdamW", 0.003),
    "AMSGrad": _torch("Adam", 0.003, amsgrad=True),
    "NAdam": _torch("NAdam", 0.003),
    "RAdam": _torch("RAdam", 0.03),
    "Adamax": _torch("Adamax", 0.01),
    "RMSprop": _torch("RMSprop", 0.001),
    "Adagrad": _torch("Adagrad", 0.01),
    "Adadelta": _torch("Adadelta", 3.0),
    "ASGD": _torch("ASGD", 0.1),
    "Adafactor": _torch("Adafactor", 0.03),
    "Muon": Kind(module="torch.optim", name="Muon", lr=0.01, matrices_only=True),
    "LARS": _extra("LARS", 0.1, trust_coefficient=0.02, momentum=0.9),
    # By default its first step is 10 lr long, and its decay is outside the ratio of norms.
    "LAMB": _extra("Lamb", 0.01, adam_debias=True, weight_decouple=False),
    "NovoGrad": _extra("NovoGrad", 0.01),
    "Lion": _extra("Lion", 0.001),
    "AdaBelief": _extra("AdaBelief", 0.003),
    "LANS": Kind(module="elastane.lans", name="LANS", lr=0.01),
}


def missing(name: str) -> str | None:
    """Return why an optimizer can't be had, or `None`."""
    kind = CATALOGUE[name]
    if importlib.util.find_spec(kind.module.partition(".")[0]) is None:
        return f"{kind.module} is not installed: pip install 'elastane[optimizers]'"
    return None
