"""The published tables: declared, run, and set beside the papers' numbers."""
