"""Versions of dictionaries. Oracle: what was done to them."""

import sys
from collections import OrderedDict

import pytest

from megatron_ssm.native import kernels, versions
from megatron_ssm.native.versions import Versions, have_versions

pytestmark = pytest.mark.skipif(not kernels.LIBRARY, reason=f"no C library: {kernels.LIBRARY.why}")
needs_versions = pytest.mark.skipif(not have_versions(), reason="the dictionaries of this Python have no versions")


class Owner:
    """Has attributes."""

    def __init__(self):
        self.one, self.two = 1, 2


class Heir(Owner):
    """Owner's attributes, of another type."""


CHANGES = {
    "replace an item": lambda plain, ordered, owner: plain.update(one=3),
    "add an item": lambda plain, ordered, owner: plain.setdefault("new", 0),
    "remove an item": lambda plain, ordered, owner: plain.pop("one"),
    "clear": lambda plain, ordered, owner: plain.clear(),
    "add an item in order": lambda plain, ordered, owner: ordered.update(new=0),
    "replace an attribute": lambda plain, ordered, owner: setattr(owner, "one", 3),
    "add an attribute": lambda plain, ordered, owner: setattr(owner, "new", 3),
    "remove an attribute": lambda plain, ordered, owner: delattr(owner, "two"),
    "another type": lambda plain, ordered, owner: setattr(owner, "__class__", Heir),
}


def owned():
    """A dictionary, an ordered one, and an object with attributes."""
    return {"one": 1, "two": 2}, OrderedDict(one=1), Owner()


def of(plain, ordered, owner):
    """The versions of what `owned` returns."""
    return Versions([plain, ordered, vars(owner)], [owner])


@needs_versions
@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_detected(change):
    given = owned()
    before = of(*given)
    assert before.are_current()
    CHANGES[change](*given)
    assert not before.are_current() and of(*given).are_current()


@needs_versions
def test_the_interpreter_may_have_specialized_the_change():
    """CPython executes an assignment in another way once it has run many times."""
    given = owned()
    for value in range(10, 100):
        before = of(*given)
        given[2].one = value
        assert not before.are_current()
        before = of(*given)
        given[0]["one"] = value
        assert not before.are_current()


@needs_versions
def test_reading_is_no_change():
    plain, ordered, owner = given = owned()
    before = of(*given)
    assert plain["one"] == ordered["one"] == owner.one == 1 and "three" not in plain and len(vars(owner)) == 2
    assert before.are_current()


def test_without_versions_nothing_is_known_to_be_current(monkeypatch):
    assert have_versions() == (sys.implementation.name == "cpython" and sys.version_info < (3, 13))
    monkeypatch.setattr(versions, "have_versions", lambda: False)
    assert not of(*owned()).are_current()
