"""What a `SparseFusion` keeps in checkpoints: a state of each rank, which any number of ranks can go on from."""

import math
from collections.abc import Mapping

import torch

from sparsefusion.gradients.fp16_reduction import MOST
from sparsefusion.planning.plan import Plan

VERSION = 3
NO_PROGRESS = {"samples": {}, "rounds": [], "turns": ["dense"]}  # of a trial, in a state of older code
KEYS = {"version", "ranks", "rank", "step", "sparse_since", "budget", "plan", "candidates", "residuals"}


def part_of(model_group) -> list[int]:
    """Which part of a divided model this rank has, and of how many."""
    return [0, 1] if model_group is None else [model_group.rank(), model_group.size()]


def orders_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """{name: strides} of what does not lie in memory as it is indexed (channels_last): residuals lie as gradients do."""
    return {name: [*p.stride()] for name, p in parameters.items() if not p.is_contiguous()}


def checked_states(state, group, parameters: Mapping[str, torch.Tensor], part) -> list[dict]:
    """`state`, this rank's or a list of all ranks' of a run, as a list.

    group: of those who go on; None: of a list it is not asked. parameters: this rank's. part: this rank's (`part_of`).
    ValueError: what they are a state of is something else.
    """
    alone = isinstance(state, Mapping)
    if not alone and not isinstance(state, list | tuple):
        raise ValueError(f"{type(state).__name__} is no state of SparseFusion, nor a list of them")
    states = [state] if alone else list(state)
    sizes, orders = {name: p.numel() for name, p in parameters.items()}, orders_of(parameters)
    for each in states:
        _check(each, sizes)
        if (saved := each.get("orders", orders)) != orders:  # states of older code do not say it
            raise ValueError(f"a state of parameters that lie otherwise in memory: strides {saved}, and here {orders}")
        if each.get("part", part) != part:  # states of older code do not say it
            raise ValueError(
                f"the state of part {each['part']} of a model, and this rank's is {part} (number, of how many)"
            )
    if not states:
        raise ValueError("no states at all")
    one, given = states[0], [each["rank"] for each in states]
    count = one["ranks"]
    if alone and count != group.size():
        raise ValueError(
            f"the state of one of {count} ranks, and here are {group.size()}: give load_state_dict the list of all "
            f"{count} ranks' states, whose mean residual every rank then takes"
        )
    if alone and one["rank"] != group.rank():
        raise ValueError(f"the state of rank {one['rank']}, and this is rank {group.rank()}")
    if not alone and sorted(given) != list(range(count)):
        raise ValueError(f"{len(states)} states of ranks {given}, and there were {count} ranks")
    for each in states:
        if any(each.get(what) != one.get(what) for what in ("ranks", "step", "plan", "half_scale")):
            raise ValueError(
                f"states of different runs or steps: rank {one['rank']}'s of step {one['step']}, rank {each['rank']}'s of "
                f"step {each['step']}"
            )
    return states


def _check(state, sizes) -> None:
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise ValueError(f"not a state of SparseFusion, or of another version than {VERSION}")
    if lacking := sorted(KEYS - set(state)):
        raise ValueError(f"a state of SparseFusion without {', '.join(lacking)}")
    for what, least in (("step", 0), ("ranks", 1), ("rank", 0), ("sparse_since", 0)):
        given = state[what]
        if (given is not None or what != "sparse_since") and not (type(given) is int and given >= least):
            raise ValueError(f"a state of SparseFusion whose {what} is {given!r}")
    scale = state.get("half_scale", 1.0)  # not in states of older code
    if not (isinstance(scale, float) and math.frexp(scale)[0] == 0.5 and abs(math.log2(scale)) <= MOST):
        raise ValueError(f"a state of SparseFusion whose half_scale is {scale!r}")
    if not isinstance(state["residuals"], Mapping):
        raise ValueError(f"a state of SparseFusion whose residuals are a {type(state['residuals']).__name__}")
    for name, residual in state["residuals"].items():
        _check_residual(name, residual, sizes)
    if state["plan"] is not None:
        Plan.from_json(state["plan"])
    if state["candidates"] is not None:
        _check_candidates(state["candidates"])


def _check_residual(name, residual, sizes) -> None:
    if not isinstance(residual, torch.Tensor):
        raise ValueError(f"a state whose residual of {name!r} is a {type(residual).__name__}")
    if sizes.get(name) != residual.numel():
        raise ValueError(f"a state with {residual.numel()} numbers of {name!r}; here it has {sizes.get(name, 'none')}")
    if residual.dim() != 1 or residual.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"a state whose residual of {name!r} is {residual.dtype} of shape {tuple(residual.shape)}, not flat and fp32"
        )


def _check_candidates(candidates) -> None:
    """Plans that take turns, each with all predictions, and how far their trial is."""
    try:
        plans = {mode: Plan.from_json(text) for mode, text in candidates["plans"].items()}
        progress, modes = candidates.get("trial") or NO_PROGRESS, set(plans)
        measured = [progress["samples"], *progress["rounds"], {"dense": candidates["dense"]}]
        measured += [plan.predicted for plan in plans.values()]
        numbers = [seconds for each in measured for seconds in each.values()]
        fits = all(plan.mode == mode and set(plan.predicted) == modes for mode, plan in plans.items())
        fits = fits and {*progress["turns"], *(mode for each in measured for mode in each)} <= modes
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a state whose candidates are none of SparseFusion: {error!r}") from None
    flat = [each for seconds in numbers for each in (seconds if isinstance(seconds, list) else [seconds])]
    fits = fits and progress["turns"] and all(progress["samples"].values())
    if not (fits and all(isinstance(seconds, float) for seconds in flat)):
        raise ValueError("a state whose candidates do not belong together")


def mean_residuals(states, device) -> dict:
    """{name: residual} that all ranks take; of one state its own."""
    names = dict.fromkeys(name for state in states for name in state["residuals"])
    found = {}
    for name in names:
        parts = [state["residuals"][name].to(device) for state in states if name in state["residuals"]]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        found[name] = total / len(states) if len(states) > 1 else total
    return found
