"""The states of a `SparseFusion` in checkpoints, one per rank, from which any number of ranks can continue."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from sparsefusion.gradients.fp16_reduction import LARGEST_SCALE_EXPONENT
from sparsefusion.planning.plan import Plan

VERSION = 3
NO_PROGRESS = {"samples": {}, "rounds": [], "turns": ["dense"]}  # the trial's progress in states of older versions
KEYS = {"version", "ranks", "rank", "step", "sparse_since", "budget", "plan", "candidates", "residuals"}


def model_part(model_group: ProcessGroup | None) -> list[int]:
    """[number of this rank's part of a divided model, number of parts]."""
    return [0, 1] if model_group is None else [model_group.rank(), model_group.size()]


def memory_strides(parameters: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """{name: strides} of non-contiguous parameters, such as channels_last, whose residuals have the same order."""
    return {name: [*p.stride()] for name, p in parameters.items() if not p.is_contiguous()}


def check_states(
    state: Mapping | Sequence, group: ProcessGroup | None, parameters: Mapping[str, torch.Tensor], part: list[int]
) -> list[Mapping]:
    """Check `state`, and return it as a list.

    Args:
        state: This rank's own state, or the list of the states of all ranks of a run.
        group: The ranks that continue. None: do not check that a single state is that of this rank.
        parameters, part: Those of this rank (see `model_part`).

    Raises:
        ValueError: A state belongs to another run, rank or model.
    """
    if not isinstance(state, Mapping | list | tuple):
        raise ValueError(f"{type(state).__name__} is neither a state of SparseFusion nor a list of states")
    states = [state] if isinstance(state, Mapping) else list(state)
    sizes, strides = {name: p.numel() for name, p in parameters.items()}, memory_strides(parameters)
    for rank_state in states:
        _check(rank_state, sizes)
        if (saved := rank_state.get("orders", strides)) != strides:  # missing in states of older versions
            raise ValueError(f"a state of parameters with another memory format: strides {saved}, and here {strides}")
        if rank_state.get("part", part) != part:  # missing in states of older versions
            raise ValueError(
                f"the state of part {rank_state['part']} of a model, and this rank has part {part} (number, count)"
            )
    if not states:
        raise ValueError("the list of states is empty")
    first, numbers = states[0], [rank_state["rank"] for rank_state in states]
    if not isinstance(state, Mapping) and sorted(numbers) != list(range(first["ranks"])):
        raise ValueError(f"{len(states)} states of ranks {numbers}, and there were {first['ranks']} ranks")
    if isinstance(state, Mapping) and group is not None:
        _check_rank(first, group)
    for other in states:
        if any(other.get(key) != first.get(key) for key in ("ranks", "step", "plan", "half_scale")):
            raise ValueError(
                f"states of different runs or steps: step {first['step']} of rank {first['rank']}, step {other['step']} of "
                f"rank {other['rank']}"
            )
    return states


def _check_rank(state: Mapping, group: ProcessGroup) -> None:
    """ValueError if the state belongs to another rank, or to a run with another number of ranks."""
    count = state["ranks"]
    if count != group.size():
        raise ValueError(
            f"the state of one of {count} ranks, and here are {group.size()}: pass load_state_dict the list of the states "
            f"of all {count} ranks, and every rank gets their mean residuals"
        )
    if state["rank"] != group.rank():
        raise ValueError(f"the state of rank {state['rank']}, and this is rank {group.rank()}")


def _check(state: object, sizes: Mapping[str, int]) -> None:
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise ValueError(f"not a state of SparseFusion of version {VERSION}")
    if missing := sorted(KEYS - set(state)):
        raise ValueError(f"a state of SparseFusion without {', '.join(missing)}")
    for key, low in (("step", 0), ("ranks", 1), ("rank", 0), ("sparse_since", 0)):
        value = state[key]
        if (value is not None or key != "sparse_since") and not (type(value) is int and value >= low):
            raise ValueError(f"a state of SparseFusion whose {key} is {value!r}")
    scale = state.get("half_scale", 1.0)  # missing in states of older versions
    if not (
        isinstance(scale, float) and math.frexp(scale)[0] == 0.5 and abs(math.log2(scale)) <= LARGEST_SCALE_EXPONENT
    ):
        raise ValueError(f"a state of SparseFusion whose half_scale is {scale!r}")
    if not isinstance(state["residuals"], Mapping):
        raise ValueError(f"a state of SparseFusion whose residuals are a {type(state['residuals']).__name__}")
    for name, residual in state["residuals"].items():
        _check_residual(name, residual, sizes)
    if state["plan"] is not None:
        Plan.from_json(state["plan"])
    if state["candidates"] is not None:
        _check_candidates(state["candidates"])


def _check_residual(name: str, residual: object, sizes: Mapping[str, int]) -> None:
    if not isinstance(residual, torch.Tensor):
        raise ValueError(f"a state whose residual of {name!r} is a {type(residual).__name__}")
    if sizes.get(name) != residual.numel():
        raise ValueError(f"a state with {residual.numel()} elements of {name!r}; here it has {sizes.get(name, 'none')}")
    if residual.dim() != 1 or residual.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"a state whose residual of {name!r} is {residual.dtype} of shape {tuple(residual.shape)}, not flat and fp32"
        )


def _check_candidates(candidates: Any) -> None:
    """Check the plans of a trial, their predictions, and the progress of the trial."""
    try:
        plans = {mode: Plan.from_json(text) for mode, text in candidates["plans"].items()}
        progress: dict = candidates.get("trial") or NO_PROGRESS
        modes = set(plans)
        measured = [progress["samples"], *progress["rounds"], {"dense": candidates["dense"]}]
        measured += [plan.predicted for plan in plans.values()]
        times = [seconds for by_mode in measured for seconds in by_mode.values()]
        fits = all(plan.mode == mode and set(plan.predicted) == modes for mode, plan in plans.items())
        fits = fits and {*progress["turns"], *(mode for by_mode in measured for mode in by_mode)} <= modes
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a state whose candidates are not SparseFusion's: {error!r}") from None
    flat = [number for seconds in times for number in (seconds if isinstance(seconds, list) else [seconds])]
    fits = fits and bool(progress["turns"]) and all(progress["samples"].values())
    if not (fits and all(isinstance(seconds, float) for seconds in flat)):
        raise ValueError("a state whose candidates do not belong together")


def mean_residuals(states: Sequence[Mapping], device: torch.device) -> dict[str, torch.Tensor]:
    """{name: mean residual over all states}; the residuals of a single state are unchanged."""
    names = dict.fromkeys(name for state in states for name in state["residuals"])
    means = {}
    for name in names:
        parts = [state["residuals"][name].to(device) for state in states if name in state["residuals"]]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        means[name] = total / len(states) if len(states) > 1 else total
    return means
