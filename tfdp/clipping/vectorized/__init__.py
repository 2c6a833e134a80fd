"""The engine that is right for any model: each example's gradient by itself, vectorised."""
