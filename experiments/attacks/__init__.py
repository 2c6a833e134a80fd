"""Membership inference against trained classifiers, as in the papers' tables."""
