"""Elastic distributed training for PyTorch: any batch with the hyper-parameters of a small one.

The names below are imported when they are first used, so that the command line starts without
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from elastane._version import __version__

if TYPE_CHECKING:
    from elastane.averaging import WeightAverage
    from elastane.batching import GlobalBatch, LocalBatch
    from elastane.data import LoaderOptions
    from elastane.durability import Checkpointing
    from elastane.evaluation import Evaluation
    from elastane.follow import Follow
    from elastane.measuring import Measuring
    from elastane.momentum import MomentumRamp, NoiseMatchedRamp
    from elastane.reporting import StepResult
    from elastane.scaling import LEGW, AdamScale, AdaScale, Identity, Linear, Sqrt, WarmUp
    from elastane.session import Session

__all__ = [
    "LEGW",
    "AdaScale",
    "AdamScale",
    "Checkpointing",
    "Evaluation",
    "Follow",
    "GlobalBatch",
    "Identity",
    "Linear",
    "LoaderOptions",
    "LocalBatch",
    "Measuring",
    "MomentumRamp",
    "NoiseMatchedRamp",
    "Session",
    "Sqrt",
    "StepResult",
    "WarmUp",
    "WeightAverage",
    "__version__",
]

_HOMES = {
    "averaging": ("WeightAverage",),
    "batching": ("GlobalBatch", "LocalBatch"),
    "data": ("LoaderOptions",),
    "durability": ("Checkpointing",),
    "evaluation": ("Evaluation",),
    "follow": ("Follow",),
    "measuring": ("Measuring",),
    "momentum": ("MomentumRamp", "NoiseMatchedRamp"),
    "reporting": ("StepResult",),
    "scaling": ("LEGW", "AdaScale", "AdamScale", "Identity", "Linear", "Sqrt", "WarmUp"),
    "session": ("Session",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
