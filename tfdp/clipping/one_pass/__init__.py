"""The engine for speed: one backward pass for the whole batch (ghost clipping, book-keeping)."""
