"""Which of a matrix's cases `make test` runs, and which only `make test-all`."""

import pytest


def by_default(chosen, cases):
    """The cases, as a parametrization takes them; those that are not chosen are marked `full`."""
    if unknown := set(chosen) - set(cases):
        raise ValueError(f"{sorted(unknown)} are none of {', '.join(cases)}")
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.full) for case in cases]
