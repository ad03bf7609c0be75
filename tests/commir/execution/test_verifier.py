"""What the verifier accepts and rejects. Oracle: interpretation on independent inputs of twice the size."""

import random
from dataclasses import fields, replace

import pytest
import torch

from commir import interpret, verify
from commir.execution.verifier import smallest, unscheduled
from commir.lowering.steps import Place
from loop_programs import cases, mesh_of, plans, random_inputs, with_steps

MESHES = [(4,), (2, 2), (2, 3)]
LARGE = [(12,), (3, 4), (2, 2, 2), (2, 2, 3)]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("sizes", MESHES[:2])
def test_lowered_plans_pass(sizes, number):
    for plan in plans(cases(mesh_of(*sizes).ranks)[number].program, mesh_of(*sizes)):
        verify(plan)


@pytest.mark.full
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("sizes", MESHES + LARGE)
def test_all_lowered_plans_on_up_to_twelve_ranks_pass(sizes, number):
    for plan in plans(cases(mesh_of(*sizes).ranks)[number].program, mesh_of(*sizes)):
        verify(plan)


def other_value(value, generator):
    """A wrong value for a field of a step."""
    if isinstance(value, int):
        return value + generator.choice([-1, 1])
    if isinstance(value, str):
        return generator.choice([name for name in "xyz" if name != value])
    if isinstance(value, Place):
        return generator.choice([replace(value, dim=value.dim + 1), replace(value, outer=value.outer * 2)])
    if isinstance(value, tuple) and value:
        index = generator.randrange(len(value))
        return (*value[:index], other_value(value[index], generator), *value[index + 1 :])
    return value


def corrupted(steps, generator):
    """Steps with one dropped, repeated, changed in a field, or exchanged with another."""
    steps = list(steps)
    index = generator.randrange(len(steps))
    kind = generator.choice(["drop", "repeat", "change", "change", "change", "exchange"])
    if kind == "drop":
        del steps[index]
    elif kind == "repeat":
        steps.insert(index, steps[index])
    elif kind == "change":
        name = generator.choice([field.name for field in fields(steps[index])])
        steps[index] = replace(steps[index], **{name: other_value(getattr(steps[index], name), generator)})
    else:
        other = generator.randrange(len(steps))
        steps[index], steps[other] = steps[other], steps[index]
    return steps


def changes_outputs(plan):
    """Whether the plan fails, or gives other outputs than the unscheduled program, on inputs of twice the size."""
    double = smallest(plan, whole=8, inner=4)
    for mask in (True, False):
        masked = double.with_options(causal=mask) if "causal" in dict(plan.program.options) else double
        inputs = random_inputs(masked.program, seed=12345)
        try:
            found = interpret(masked, inputs)
        except (RuntimeError, ValueError, KeyError, IndexError):
            return True
        expected = unscheduled(masked.program, inputs)
        if not all(torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-9) for name in found):
            return True
    return False


def check_corruptions(sizes, number, count, seed=0):
    """Corrupt `count` plans: each corruption that changes an output is rejected. Returns how many there were."""
    generator, harmful = random.Random(seed), 0
    chosen = plans(cases(mesh_of(*sizes).ranks)[number].program, mesh_of(*sizes))
    for _ in range(count):
        plan = generator.choice(chosen)
        wrong = with_steps(plan, corrupted(plan.steps, generator))
        if changes_outputs(wrong):
            harmful += 1
            with pytest.raises(ValueError):
                verify(wrong)
    return harmful


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("sizes", MESHES)
def test_corruptions_are_rejected(sizes, number):
    assert check_corruptions(sizes, number, 30) > 10


@pytest.mark.full
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("sizes", MESHES + LARGE[:3])
def test_many_corruptions_are_rejected(sizes, number):
    assert check_corruptions(sizes, number, 400, seed=1) > 200


def test_errors_name_the_first_wrong_element():
    (plan,) = [plan for plan in plans(cases(2)[5].program, mesh_of(2)) if "rows shifted" in str(plan.schedule)]
    steps = [step for step in plan.steps if type(step).__name__ != "Combine"]
    with pytest.raises(ValueError, match=r"weighted_sum on Mesh\(x=2\).*c\[0\] combines the block at cols 1 0 times"):
        verify(with_steps(plan, steps))
