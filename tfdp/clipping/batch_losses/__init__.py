"""Losses with a term over the whole batch, and how their gradients are clipped."""
