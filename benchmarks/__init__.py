"""Measurements behind the claims of the documentation: one file per claim, grouped like the pages of `docs/results`."""
