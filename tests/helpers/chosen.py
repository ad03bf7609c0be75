"""Chooses the cases of a test matrix that `make test` runs; `make test-all` runs all of them."""

import pytest


def by_default(chosen, cases):
    """The cases as values for pytest.mark.parametrize; those that are not chosen are marked `full`."""
    if unknown := set(chosen) - set(cases):
        raise ValueError(f"{sorted(unknown)} are none of {', '.join(cases)}")
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.full) for case in cases]
