"""Selective update and release: counterexample, cost of the true bound, search, pictures."""
