"""Predicted divisions as text and as JSON: the first, the runner-up, and why it lost."""

from dataclasses import asdict
from typing import Any

from .divisions import Division, Generation, Training

MILLI = 1e3


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

    What does not apply to the job is null.
    """
    others = ("ttft", "tpot") if isinstance(job, Training) else ("gradients", "recompute")
    every = [asdict(each) | {"seconds": each.seconds} | dict.fromkeys(others) for each in found]
    possible = [each for each in found if not each.excluded]
    return {
        "best": every[0] if possible else None,
        "runner_up": every[1] if len(possible) > 1 else None,
        "reason": why(*possible[:2]) if len(possible) > 1 else "no other division is possible",
        "all": every,
    }


def training_text(found: list[Division], job: Training, is_bf16: bool) -> str:
    """The advice for training, as lines. is_bf16: the device's rates are those of bfloat16."""
    best, *_ = found
    options = [f"--tensor-model-parallel-size {best.tensor}", f"--context-parallel-size {best.context}"]
    options += [
        f"--seq-length {job.seq}",
        f"--global-batch-size {job.global_batch}",
        f"--micro-batch-size {job.micro_batch}",
    ]
    options += ["--bf16"] * is_bf16
    options += [f"--reduce {best.format}"] if best.tensor > 1 and best.format != "fp32" else []
    options += [f"--gradient-mode {best.gradients}"] if best.gradients != "dense" else []
    options += ["--recompute-activations"] if best.recompute else []
    facts = [f"{best.seconds * MILLI:.4g} ms per step", f"{best.memory / 1e9:.3g} GB"]
    facts += [f"attention in a grid of {best.attention}"] if best.attention else []
    return _text("training", found, facts, options, "ms per step", lambda each: f"{each.seconds * MILLI:.4g}")


def generation_text(found: list[Division], is_bf16: bool) -> str:
    """The advice for generation, as lines. is_bf16: as for `training_text`."""
    best, *_ = found
    options = [f"--tp {best.tensor}"] + [f"--cp {best.context}"] * (best.context > 1)
    options += [f"--reduce {best.format}"] if best.tensor > 1 and best.format != "fp32" else []
    options += ["--dtype bfloat16"] * is_bf16
    facts = [_reply(best), f"{best.memory / 1e9:.3g} GB"]
    facts += [f"{best.data} replicas"] if best.data > 1 else []
    return _text("generation", found, facts, options, "TTFT, TPOT", _reply)


def _reply(each: Division) -> str:
    return f"TTFT {each.ttft * MILLI:.4g} ms, TPOT {each.tpot * MILLI:.4g} ms"


def _text(job: str, found: list[Division], facts: list[str], options: list[str], unit: str, value: Any) -> str:
    """The best division with its options, why the next one lost, and a table of all."""
    best, *others = found
    if best.excluded:
        return "\n".join([f"{job}: no division is possible", *(f"  {each.sizes}: {each.excluded}" for each in found)])
    lines = [f"{job}: {best.sizes}: {', '.join(facts)}", f"  {' '.join(options)}"]
    possible = [each for each in others if not each.excluded]
    lines += [f"  next: {why(best, possible[0])}"] if possible else []
    rows = [
        (each.sizes, each.excluded or value(each), _parts(each), each.format, f"{each.memory / 1e9:.3g}")
        for each in found
    ]
    table = [("", unit, "parts", "sums in", "GB"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(5)]
    return "\n".join([*lines, *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table)])


def _parts(each: Division) -> str:
    """The share of each part of the time."""
    shares = {name: time / each.seconds for name, time in each.parts.items() if each.seconds}
    return ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share >= 0.01)
