"""Methods from papers, for comparison: correct, but never the best choice."""

from tfdp.base import compat

compat.prepare_tensorflow()

from tfdp.contrib import pate
from tfdp.contrib.adaptive_descent import AdaptiveGradientDescent
from tfdp.contrib.aggregations import BatchAggregation, MicroAggregation
from tfdp.contrib.compression import RandomMask, TopK
from tfdp.contrib.descent_budget import DescentOptions, calibrate_descent
from tfdp.contrib.importance_sampling import ImportanceSamplingClipping
from tfdp.contrib.perturbed_clipping import PerturbedClipping

__all__ = [
    "AdaptiveGradientDescent",
    "BatchAggregation",
    "DescentOptions",
    "ImportanceSamplingClipping",
    "MicroAggregation",
    "PerturbedClipping",
    "RandomMask",
    "TopK",
    "calibrate_descent",
    "pate",
]
