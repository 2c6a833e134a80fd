"""Choosing the settings of a private training among runs, at one epsilon for all of it."""
