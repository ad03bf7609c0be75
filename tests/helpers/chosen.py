"""Chooses the cases of a test matrix that `make test` runs; `make test-all` runs all of them."""

from collections.abc import Sequence

import pytest


def by_default(chosen, cases):
    """The cases as values for pytest.mark.parametrize; those that are not chosen are marked `full`."""
    if unknown := set(chosen) - set(cases):
        raise ValueError(f"{sorted(unknown)} are none of {', '.join(cases)}")
    return [case if case in chosen else full(case) for case in cases]


def full(*values):
    """A case of several parameters, marked `full`."""
    return pytest.param(*values, marks=pytest.mark.full)


def covering(cases: Sequence[dict]) -> list[int]:
    """The indices of a few cases that together have every value of every parameter. cases: {parameter: value} each."""
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    missing, indices = set().union(*values), []
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(values[i] & missing), -i))  # the first of the best
        missing -= values[best]
        indices.append(best)
    return indices or [0]
