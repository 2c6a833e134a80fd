"""How the clipped sum of gradients is computed."""

from tfdp.clipping.engine import ClippedSum, ClippingEngine
from tfdp.clipping.vectorized import VectorizedClipping

__all__ = ["ClippedSum", "ClippingEngine", "VectorizedClipping"]
