"""Bounds on epsilon beside other accountants', and the published one of DPSUR."""
