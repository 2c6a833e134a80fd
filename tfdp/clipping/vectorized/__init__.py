"""Engine for any model: each example's gradient by itself, vectorized."""
