"""How the clipped sum of gradients is computed."""

from tfdp.clipping.engine import ClippedSum, ClippingEngine
from tfdp.clipping.one_pass import OnePassClipping
from tfdp.clipping.vectorized import VectorizedClipping

__all__ = ["ClippedSum", "ClippingEngine", "OnePassClipping", "VectorizedClipping"]
