"""Privacy cards: one page with all that a reader must know about the privacy of a model."""
