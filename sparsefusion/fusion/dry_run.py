"""What would it bring? Said before anything is switched on."""

import sys

from sparsefusion.planning.plan import AS_THEY_COME


def dry_run(plans, seconds, wish, timeline) -> str:
    """A table of the plans {mode: plan}: predicted seconds, what a rank gives to collectives, in how many buffers.

    Bytes of places leave out 4 for each 65,536 numbers that are selected from.
    """
    ranks = next(iter(plans.values())).ranks
    lines = [
        f"sparsefusion: {ranks} ranks, {len(timeline.tensors)} gradients of {timeline.numel:,} numbers in "
        f"{_several(len(timeline.atoms), 'bucket')}; a step that sends all takes {1e3 * timeline.step:.0f} ms. Predicted:"
    ]
    for mode, plan in plans.items():
        nbytes = _bytes(plan, wish, timeline)
        whole, selected, numel = plan.sent_numbers if plan.buffers else (1, 0, 1)
        lines.append(
            f"  {mode:<12}{1e3 * seconds[mode]:8.0f} ms{nbytes / 1e6:10.2f} MB, {(whole + selected) / numel:6.1%} of "
            f"all numbers, in {_several(len(plan.buffers) or len(timeline.atoms), 'buffer')}"
        )
    return "\n".join(lines)


def verdict(mode, measured) -> str:
    """What a trial found: the mode that stays, and {mode: seconds} of a step of those that had turns, and of dense."""
    tried = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in measured.items())
    return f"sparsefusion: {mode}, for steps took: {tried}"


def to_stderr(text: str) -> None:
    """Where it is said if nobody else takes it."""
    print(text, file=sys.stderr, flush=True)


def _bytes(plan, wish, timeline) -> int:
    if plan.mode in AS_THEY_COME:
        return timeline.numel * (2 if plan.mode == "fp16" else timeline.sent)
    dense, sparse, _ = plan.sent_numbers
    filled = sum(wish.filled(unit.k) for buffer in plan.buffers for unit in buffer.units)
    return dense * timeline.itemsize + wish.sent_bytes(sparse, timeline.itemsize, filled)


def _several(count, what) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"
