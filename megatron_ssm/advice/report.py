"""Predicted divisions as text and as JSON: the first, the runner-up, and why it lost."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from .divisions import Division, Generation, Training

MILLI = 1e3
# Of a division that is excluded.
UNKNOWN = ("parts", "seconds", "ttft", "tpot", "format", "attention", "schedule", "gradients", "recompute")


def why(first: Division, second: Division) -> str:
    """One sentence: how much longer the second takes, and the part of its time in which it loses the most."""
    lost = {name: time - first.parts.get(name, 0.0) for name, time in second.parts.items()}
    part = max(lost, key=lambda name: lost[name])
    ratio = second.seconds / first.seconds
    if ratio < 1.01:
        return f"{second.sizes} is as fast within 1 %"
    return f"{second.sizes} takes {ratio:.2f} times as long: {part} takes {lost[part] * MILLI:.3g} ms more"


def as_json(found: list[Division], job: Training | Generation) -> dict[str, Any]:
    """The first division, the runner-up, why it lost, and all divisions, in JSON's types; times are seconds.

    What does not apply to the job is null, and so is what is not known of a division that is excluded.
    """
    others = ("ttft", "tpot") if isinstance(job, Training) else ("gradients", "recompute", "schedule")
    every = [asdict(each) | {"seconds": each.seconds} | dict.fromkeys(others) for each in found]
    for content in (each for each in every if each["excluded"]):
        content |= dict.fromkeys(UNKNOWN) | {"memory": content["memory"] or None}
    possible = [each for each in found if not each.excluded]
    others_fail = "no other division is possible" if possible else _nothing(found, job)
    return {
        "best": every[0] if possible else None,
        "runner_up": every[1] if len(possible) > 1 else None,
        "reason": why(*possible[:2]) if len(possible) > 1 else others_fail,
        "all": every,
    }


def _nothing(found: list[Division], job: Training | Generation) -> str:
    """That no division is possible, and what helps if some of them need more memory than a rank has."""
    smaller = "--micro-batch-size or --seq-length" if isinstance(job, Training) else "--batch or --prompt"
    hint = f"; a rank needs less memory with more ranks, or a smaller {smaller}"
    return "no division is possible" + hint * any(each.memory for each in found)


def training_text(found: list[Division], job: Training, is_bf16: bool) -> str:
    """The advice for training, as lines. is_bf16: the device's rates are those of bfloat16."""
    best, *_ = found
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
    return _text("training", found, job, facts, options, "ms per step", lambda each: f"{each.seconds * MILLI:.4g}")


def generation_text(found: list[Division], job: Generation, is_bf16: bool) -> str:
    """The advice for generation, as lines. is_bf16: as for `training_text`."""
    best, *_ = found
    options = [f"--tp {best.tensor}"] + [f"--cp {best.context}"] * (best.context > 1)
    options += [f"--ep {best.expert}"] * (best.expert > 1)
    options += [f"--reduce {best.format}"] if best.tensor * best.expert > 1 and best.format != "fp32" else []
    options += ["--draft-head"] * job.draft_head + ["--dtype bfloat16"] * is_bf16
    facts = [_reply(best), f"{best.memory / 1e9:.3g} GB"]
    facts += [f"attention in a grid of {best.attention}"] if best.attention else []
    text = _text("generation", found, job, facts, options, "TTFT, TPOT", _reply)
    if best.replicas == 1 or best.excluded:
        return text
    first, command, *rest = text.splitlines()
    return "\n".join([first, command, f"  {_replicas(best)}", *rest])


def _replicas(best: Division) -> str:
    """How to run them: the ranks of one command are those of one replica."""
    ranks, count = best.tensor * best.context * best.expert, best.replicas
    each = f"each on {ranks} rank{'s' * (ranks > 1)} of its own"
    return f"{count} replicas: start `serve` or `generate` {count} times, {each}, and divide the requests"


def _reply(each: Division) -> str:
    return f"TTFT {each.ttft * MILLI:.4g} ms, TPOT {each.tpot * MILLI:.4g} ms"


def _text(
    name: str, found: list[Division], job: Training | Generation, facts: list[str], options: list[str], unit: str,
    value: Callable[[Division], str],
) -> str:  # fmt: skip
    """The best division with its options, why the next one lost, and a table of all."""
    possible = [each for each in found if not each.excluded]
    reasons = [f"  {each.sizes}: {each.excluded}" for each in found if each.excluded]
    if not possible:
        return "\n".join([f"{name}: {_nothing(found, job)}", *reasons])
    lines = [f"{name}: {possible[0].sizes}: {', '.join(facts)}", f"  {' '.join(options)}"]
    lines += [f"  next: {why(*possible[:2])}"] if len(possible) > 1 else []
    rows = [(each.sizes, value(each), _parts(each), each.format, _gigabytes(each)) for each in possible]
    rows += [(each.sizes, "-", "-", "-", _gigabytes(each)) for each in found if each.excluded]
    table = [("", unit, "parts", "sums in", "GB"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(5)]
    lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join([*lines, *reasons])


def _gigabytes(each: Division) -> str:
    return f"{each.memory / 1e9:.3g}" if each.memory else "-"


def _parts(each: Division) -> str:
    """The share of each part of the time."""
    shares = {name: time / each.seconds for name, time in each.parts.items() if each.seconds}
    return ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share >= 0.01)
