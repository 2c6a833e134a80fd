"""Training of a model beyond one step, and the checks before it; both Kerases share it."""
