"""The rows of the table: what people train with, each written down for library and oracle."""

from benchmarks.oracle.features import adaptive, batches, kinds, precision, sharded, steps
from benchmarks.oracle.features.feature import Feature

__all__ = ["FEATURES", "Feature"]

FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        *batches.FEATURES,
        *precision.FEATURES,
        *steps.FEATURES,
        *adaptive.FEATURES,
        *kinds.FEATURES,
        *sharded.FEATURES,
    )
}
"""All features by name, in the order of the table."""
