"""Elastic distributed training for PyTorch: workers come and go, the model comes out as good."""

from elastane._version import __version__
from elastane.batching import GlobalBatch, LocalBatch
from elastane.controller import Measuring
from elastane.data import LoaderOptions
from elastane.evaluation import Evaluation
from elastane.momentum import MomentumRamp, NoiseMatchedRamp
from elastane.reporting import StepResult
from elastane.scaling import LEGW, AdamScale, AdaScale, Identity, Linear, Sqrt, WarmUp
from elastane.session import Session

__all__ = [
    "LEGW",
    "AdaScale",
    "AdamScale",
    "Evaluation",
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
    "__version__",
]
