"""Clipped sums of per-example gradients."""

from typing import TYPE_CHECKING

from tfdp.base import compat, lazy

compat.prepare_tensorflow()

if TYPE_CHECKING:
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
    from tfdp.clipping.example_losses import per_example_losses
    from tfdp.clipping.one_pass.one_pass_engine import OnePassEngine
    from tfdp.clipping.one_pass.op_gradients.registry import register_op_gradients
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

__getattr__, __dir__ = lazy.attributes(
    __name__,
    {
        "AdaptiveQuantileClipping": "tfdp.clipping.clipping_rules",
        "Aggregation": "tfdp.clipping.batch_losses.two_term_loss",
        "AutomaticClipping": "tfdp.clipping.clipping_rules",
        "ClippedSum": "tfdp.clipping.engine",
        "ClippingEngine": "tfdp.clipping.engine",
        "ClippingRule": "tfdp.clipping.clipping_rules",
        "FlatClipping": "tfdp.clipping.clipping_rules",
        "OnePassEngine": "tfdp.clipping.one_pass.one_pass_engine",
        "PerLayerClipping": "tfdp.clipping.clipping_rules",
        "Report": "tfdp.clipping.report",
        "Sensitivities": "tfdp.clipping.batch_losses.aggregations",
        "SlowClippingWarning": "tfdp.clipping.report",
        "TermWiseAggregation": "tfdp.clipping.batch_losses.aggregations",
        "TwoTermLoss": "tfdp.clipping.batch_losses.two_term_loss",
        "VectorizedEngine": "tfdp.clipping.vectorized.vectorized_engine",
        "per_example_losses": "tfdp.clipping.example_losses",
        "register_op_gradients": "tfdp.clipping.one_pass.op_gradients.registry",
    },
)
