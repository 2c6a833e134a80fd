"""Clipped sums of per-example gradients."""

from tfdp.base import compat

compat.prepare_tensorflow()

from tfdp.clipping.batch_losses.aggregations import (
    Sensitivities,
    TermWiseAggregation,
)
from tfdp.clipping.batch_losses.two_term_loss import Aggregation, TwoTermLoss
from tfdp.clipping.clipping_rules import (
    AdaptiveQuantileClipping,
    AutomaticClipping,
    ClippingRule,
    FlatClipping,
    PerLayerClipping,
)
from tfdp.clipping.engine import ClippedSum, ClippingEngine
from tfdp.clipping.one_pass.one_pass_engine import OnePassEngine
from tfdp.clipping.one_pass.op_gradients.registry import register_op_gradients
from tfdp.clipping.per_example_losses import per_example_losses
from tfdp.clipping.report import Report, SlowClippingWarning
from tfdp.clipping.vectorized.vectorized_engine import VectorizedEngine

__all__ = [
    "AdaptiveQuantileClipping",
    "Aggregation",
    "AutomaticClipping",
    "ClippedSum",
    "ClippingEngine",
    "ClippingRule",
    "FlatClipping",
    "OnePassEngine",
    "PerLayerClipping",
    "Report",
    "Sensitivities",
    "SlowClippingWarning",
    "TermWiseAggregation",
    "TwoTermLoss",
    "VectorizedEngine",
    "per_example_losses",
    "register_op_gradients",
]
