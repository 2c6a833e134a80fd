"""Proof of which rows of a graph's tensors belong to which example."""
