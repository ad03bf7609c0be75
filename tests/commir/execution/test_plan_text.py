"""Plans as text: what is read back, and what is refused. Oracle: the plan that was written, and its hash."""

import hashlib
import json
import re

import pytest

from benchmarks.support.plans import effect
from commir import Mesh, Plan, Schedule, programs, verify
from commir.execution.verifier import VerificationError
from commir.lowering.plan_steps import KINDS
from commir.lowering.plan_text import canonical
from commir.scheduling.placements import Placement, place

# By default, each path gets every seventh value, beginning with another one than its neighbours.
thorough = pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.full)])
VALUES = [None, [], {}, 0, -1, 5, 10**30, 1.5, True, "x", "a\nb", [1], [["x"]]]


def some_plans():
    """Attention with a ring and a split axis, and a scan with rates."""
    attention, mesh = programs.attention(1, 4, 2, 16, 4), Mesh(x=2, y=2).split("y", c=2)
    return [
        place(Schedule(attention, mesh), x=Placement("q", True), c="heads").lower(),
        place(Schedule(programs.selective_scan(1, 8, 4), Mesh(x=2)), x="seq").lower(),
    ]


PLANS = some_plans()


def paths(value, path=()):
    """The paths of all keys and elements inside a value of JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from paths(inner, (*path, key))


def at(value, path):
    """The value at a path."""
    for key in path:
        value = value[key]
    return value


def changed(text, path, value):
    """The content of a text with another value at a path."""
    found = json.loads(text)
    at(found, path[:-1])[path[-1]] = value
    return found


def with_hash(content):
    """The text of a content with the hash that belongs to it."""
    content = {key: value for key, value in content.items() if key != "hash"}
    return json.dumps(content | {"hash": hashlib.sha256(canonical(content).encode()).hexdigest()})


def refusal(text):
    """The message with which a text is refused, which is one line."""
    with pytest.raises(ValueError) as caught:
        Plan.from_json(text)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@thorough
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.program.name)
def test_every_changed_value_is_refused(plan, step):
    text = plan.to_json()
    content = json.loads(text)
    for number, path in enumerate(paths(content)):
        for value in VALUES[number % step :: step]:
            old = at(content, path)
            is_same = value == old and type(value) is type(old) or (value, old) == ({}, [])  # fields of a step: none
            if not is_same:
                refusal(json.dumps(changed(text, path, value)))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.program.name)
def test_every_missing_or_added_key_is_refused(plan):
    text = plan.to_json()
    for path in ((), *paths(json.loads(text))):
        inner = at(json.loads(text), path)
        for key in inner if isinstance(inner, dict) else ():
            found = json.loads(text)
            del at(found, path)[key]
            assert key in refusal(json.dumps(found))
        if isinstance(inner, dict):
            assert "extra" in refusal(json.dumps(changed(text, (*path, "extra"), 1)))


def test_a_tile_without_blocks_is_refused():
    plan = Schedule(programs.weighted_sum(8, 8), Mesh(x=2)).tile("rows", 2).parallelize("rows.o", "x").lower()
    found = refusal(plan.to_json().replace('["tile","rows",2,', '["tile","rows",0,'))
    assert "schedule[0]: tile(rows, 0): 0 does not divide rows, which has size 8" in found


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("steps", 1, 0), "Jump", r"steps\[1\]: unknown step 'Jump': expected .*"),
        (("steps", 1, 1, 0), 2.5, r"steps\[1\], \w+\.\w+ is 2\.5: expected .*"),
        (("steps", 1, 1), [], r"steps\[1\], \w+ is \[\]: expected .*"),
        (("steps", 1), 7, r"steps\[1\] is 7: expected list"),
        (("steps",), 7, r"steps is 7: expected list"),
        (("mesh", 0, "size"), "two", r"mesh\[0\]\.size is 'two': expected int"),
        (("program", "axes", 0, "name"), 3, r"program\.axes\[0\]\.name is 3: expected str"),
        (("hash",), 5, "hash is 5: expected str"),
        (("schedule",), [5], r"schedule\[0\] is 5: expected list"),
        (("schedule", 3, 0), "serialize", r"schedule\[3\]: unknown primitive 'serialize': .*"),
        (("program", "options"), [], r"program\.options is \[\]: expected dict"),
        (("version",), 2, "version is 2: expected 1"),
    ],
)
def test_the_error_names_the_place(path, value, message):
    found = refusal(json.dumps(changed(PLANS[0].to_json(), path, value)))
    assert re.fullmatch("not a plan, or a damaged one: ValueError: " + message, found), found


def another(value):
    """A value of the same type."""
    return value + 1 if isinstance(value, int) else {"x": "c"}.get(value, "x")


def fields_of(steps):
    """One path to each field of each kind of step, and to the numbers and names inside of it."""
    found = {}
    for path in paths(steps):
        if len(path) > 2 and not isinstance(at(steps, path), list):
            found.setdefault((steps[path[0]][0], *path[1:]), path)
    return found.values()


def more_plans():
    """With travelling partial results, swapped mesh axes, a derived input, scattered and whole results, states in slices."""
    pairs = Mesh(x=2, y=2)
    travelling = place(
        Schedule(programs.attention(1, 4, 2, 16, 4), pairs), x=Placement("kv", True), y=Placement("q", True)
    )
    kept = Schedule(programs.attention(1, 4, 4, 16, 4), pairs).shard("q", "heads", "y")
    backward = Schedule(programs.attention(1, 4, 4, 16, 4, backward=True), Mesh(x=2))
    whole = place(Schedule(programs.weighted_sum(8, 8), Mesh(x=2)).replicate("c", "x"), x="cols")
    states = place(Schedule(programs.selective_scan(1, 8, 4), Mesh(x=4)), x="seq")
    mapped = place(Schedule(programs.gated_delta(1, 8, 4, 2, 2), Mesh(x=2)), x="seq")
    swapped = place(kept, x="heads", y="q")
    scattered = place(Schedule(programs.matmul_reduce_scatter(8, 8, 8), Mesh(x=2)), x="inner")
    scheduled = travelling, swapped, place(backward, x="heads"), whole, scattered, states, mapped
    return [each.lower() for each in scheduled]


def test_a_changed_step_is_refused_by_the_hash():
    """Every field of every kind of step, with another value of its type."""
    kinds = set()
    for plan in [*PLANS, *more_plans()]:
        text = plan.to_json()
        steps = json.loads(text)["steps"]
        for path in fields_of(steps):
            message = refusal(json.dumps(changed(text, ("steps", *path), another(at(steps, path)))))
            assert re.fullmatch(r"this plan was changed after it was saved: its hash is \w{12}, not \w{12}", message)
            kinds.add(steps[path[0]][0])
    assert kinds == set(KINDS) - {"Summarize", "PassStates"}  # which have no fields


def test_a_text_of_an_earlier_version_is_read():
    """It had digests of its parts."""
    content = json.loads(PLANS[0].to_json()) | {"digests": {"axis q": "0a1b2c3d"}}
    assert Plan.from_json(json.dumps(content)) == PLANS[0]


@pytest.mark.parametrize("text", [None, 5, b"abc", "", "[]", "{}", "NaN", "[" * 100_000, '"a\\nb"'])
def test_other_texts_are_refused(text):
    assert refusal(text).startswith("not a plan, or a damaged one: ")


@thorough
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.program.name)
def test_a_text_with_the_hash_of_its_changes_is_refused_or_refuted(plan, step):
    """A plan that someone else wrote may be wrong in any way: reading and verifying it say so in one line."""
    text = plan.to_json()
    for number, path in enumerate(paths(json.loads(text)["steps"], ("steps",))):
        for value in VALUES[number % step :: step]:
            try:
                accepted = Plan.from_json(with_hash(changed(text, path, value)))
                verify(accepted)
            except ValueError as error:
                assert len(str(error).splitlines()) == 1
            else:
                assert not effect(accepted), path


def test_a_scan_with_another_number_of_blocks_is_refuted():
    (number,) = (n for n, axis in enumerate(PLANS[1].program.axes) if axis.name == "blocks")
    plan = Plan.from_json(with_hash(changed(PLANS[1].to_json(), ("program", "axes", number, "size"), 10**18)))
    with pytest.raises(VerificationError, match="axis blocks has size 1000000000000000000, but seq has 4 blocks"):
        verify(plan)


def test_a_part_may_have_the_name_of_another_level():
    mesh = Mesh(x=2, y=2).split("y", c=1, d=2).split("x", y=2, e=1)
    plan = place(Schedule(programs.weighted_sum(8, 8), mesh), y="rows", e="rows", c="cols", d="cols").lower()
    read = Plan.from_json(plan.to_json())
    assert read == plan and [axis.level for axis in read.mesh.axes] == ["x", "x", "y", "y"]
