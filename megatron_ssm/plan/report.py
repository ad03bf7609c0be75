"""Writes predicted divisions as text and as JSON: the best one, the next one, and the reason for their order."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from .divisions import Division, Generation, Training

MILLI = 1e3
# Fields of an excluded division that are null.
UNKNOWN = ("parts", "seconds", "ttft", "tpot", "format", "attention", "schedule", "gradients", "recompute")


def why(first: Division, second: Division) -> str:
    """A sentence that says how much longer the second division takes, and which part of its time accounts for most of it."""
    lost = {name: time - first.parts.get(name, 0.0) for name, time in second.parts.items()}
    part = max(lost, key=lambda name: lost[name])
    ratio = second.seconds / first.seconds
    if ratio < 1.01:
        return f"{second.sizes} is as fast within 1 %"
    return f"{second.sizes} takes {ratio:.2f} times as long: {part} takes {lost[part] * MILLI:.3g} ms more"


def as_json(divisions: list[Division], job: Training | Generation) -> dict[str, Any]:
    """The best division, the next one, the reason for their order, and all divisions as JSON values; times are seconds.

    Fields that do not apply to the job, and unknown fields of an excluded division, are null.
    """
    inapplicable = ("ttft", "tpot") if isinstance(job, Training) else ("gradients", "recompute", "schedule")
    contents = [
        asdict(division) | {"seconds": division.seconds} | dict.fromkeys(inapplicable) for division in divisions
    ]
    if isinstance(job, Generation):
        for content, division in zip(contents, divisions, strict=True):
            content["tokens_per_s"] = None if division.excluded else division.throughput(job)
    for content in contents:
        if content["excluded"]:
            content |= dict.fromkeys(UNKNOWN) | {"memory": content["memory"] or None}
    possible = [division for division in divisions if not division.excluded]
    no_second = "no other division is possible" if possible else _none_possible(divisions, job)
    return {
        "best": contents[0] if possible else None,
        "runner_up": contents[1] if len(possible) > 1 else None,
        "reason": why(*possible[:2]) if len(possible) > 1 else no_second,
        "all": contents,
    }


def _none_possible(divisions: list[Division], job: Training | Generation) -> str:
    """A sentence that no division is possible, with a hint if one of them needs more memory than a rank has."""
    smaller = "--micro-batch-size or --seq-length" if isinstance(job, Training) else "--batch or --prompt"
    hint = f"; a rank needs less memory with more ranks, or a smaller {smaller}"
    return "no division is possible" + hint * any(division.memory for division in divisions)


def training_text(divisions: list[Division], job: Training, is_bf16: bool) -> str:
    """The advice for training as lines. If `is_bf16`, its options include --bf16."""
    best, *_ = divisions
    options = [f"--tensor-model-parallel-size {best.tensor}", f"--context-parallel-size {best.context}"]
    options += [f"--expert-model-parallel-size {best.expert}"] * (best.expert > 1)
    options += [
        f"--seq-length {job.seq}",
        f"--global-batch-size {job.global_batch}",
        f"--micro-batch-size {job.micro_batch}",
    ]
    options += ["--bf16"] * is_bf16
    options += [f"--context-schedule {best.schedule}"] if best.schedule != "auto" else []
    options += [f"--reduce {best.format}"] if best.tensor > 1 and best.format != "fp32" else []
    options += [f"--gradient-mode {best.gradients}"] if best.gradients != "dense" else []
    options += ["--recompute-activations"] if best.recompute else []
    facts = [f"{best.seconds * MILLI:.4g} ms per step", f"{best.memory / 1e9:.3g} GB"]
    facts += [f"attention in a grid of {best.attention}"] if best.attention else []
    value: Callable[[Division], str] = lambda division: f"{division.seconds * MILLI:.4g}"  # noqa: E731
    return _text("training", divisions, job, facts, options, "ms per step", value)


def generation_text(divisions: list[Division], job: Generation, is_bf16: bool) -> str:
    """The advice for generation as lines. If `is_bf16`, its options include --dtype bfloat16."""
    best, *_ = divisions
    options = _options_of_ranks(best)
    options += [f"--reduce {best.format}"] if best.tensor * best.expert > 1 and best.format != "fp32" else []
    options += ["--draft-head"] * job.draft_head + ["--dtype bfloat16"] * is_bf16
    if best.excluded:
        return _text("generation", divisions, job, [], options, "", str)
    facts = [_reply(best, job), f"{best.memory / 1e9:.3g} GB"]
    facts += [f"attention in a grid of {best.attention}"] if best.attention else []
    text = _text("generation", divisions, job, facts, options, "TTFT, TPOT, throughput", partial(_reply, job=job))
    first, command, *rest = text.splitlines()
    most = max((division for division in divisions if not division.excluded), key=lambda d: d.throughput(job))
    notes = [f"  {_start(best)}"] * (best.replicas > 1)
    if most is not best:
        notes += [f"  most tokens per second: {most.sizes}: {_reply(most, job)}, {_gigabytes(most)} GB; {_start(most)}"]
    return "\n".join([first, command, *notes, *rest])


def _start(division: Division) -> str:
    """How to start the replicas of a division, each of which answers its share of the requests."""
    count, ranks = division.replicas, division.tensor * division.context * division.expert
    served = f"serve --replicas {count} {' '.join(_options_of_ranks(division))}"
    command = served if division.context == 1 else f"start generate {count} times"  # `serve` has no context ranks
    return f"{count} replicas, each on {ranks} rank{'s' * (ranks > 1)} of its own: {command}"


def _options_of_ranks(division: Division) -> list[str]:
    options = [f"--tp {division.tensor}"] + [f"--cp {division.context}"] * (division.context > 1)
    return options + [f"--ep {division.expert}"] * (division.expert > 1)


def _reply(division: Division, job: Generation) -> str:
    times = f"TTFT {division.ttft * MILLI:.4g} ms, TPOT {division.tpot * MILLI:.4g} ms"
    return f"{times}, {division.throughput(job):,.0f} tokens/s"


def _text(
    name: str, divisions: list[Division], job: Training | Generation, facts: list[str], options: list[str], unit: str,
    value: Callable[[Division], str],
) -> str:  # fmt: skip
    """The best division with its options, the reason why the next one is slower, and a table of all divisions."""
    possible = [division for division in divisions if not division.excluded]
    excluded = [division for division in divisions if division.excluded]
    reasons = [f"  {division.sizes}: {division.excluded}" for division in excluded]
    if not possible:
        return "\n".join([f"{name}: {_none_possible(divisions, job)}", *reasons])
    lines = [f"{name}: {possible[0].sizes}: {', '.join(facts)}", f"  {' '.join(options)}"]
    lines += [f"  next: {why(*possible[:2])}"] if len(possible) > 1 else []
    rows = [
        (division.sizes, value(division), _parts(division), division.format, _gigabytes(division))
        for division in possible
    ]
    rows += [(division.sizes, "-", "-", "-", _gigabytes(division)) for division in excluded]
    table = [("", unit, "parts", "sums in", "GB"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(5)]
    lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join([*lines, *reasons])


def _gigabytes(division: Division) -> str:
    return f"{division.memory / 1e9:.3g}" if division.memory else "-"


def _parts(division: Division) -> str:
    shares = {name: time / division.seconds for name, time in division.parts.items() if division.seconds}
    return ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share >= 0.01)
