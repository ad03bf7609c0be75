"""Reports to the user: the predicted time and traffic of each mode, and the result of a trial."""

import sys
from collections.abc import Mapping

from sparsefusion.planning.compression import CompressionSettings
from sparsefusion.planning.plan import FRAMEWORK_BUCKET_MODES, Plan
from sparsefusion.planning.timeline import Timeline


def dry_run(
    plans: Mapping[str, Plan], seconds: Mapping[str, float], compression: CompressionSettings, timeline: Timeline
) -> str:
    """A table of plans ({mode: plan}): predicted seconds, bytes that a rank sends, and the number of buffers.

    The bytes leave out the 4 bytes that indices take per 65,536 elements of the gradients.
    """
    ranks = next(iter(plans.values())).ranks
    lines = [
        f"sparsefusion: {ranks} ranks, {len(timeline.tensors)} gradients of {timeline.numel:,} elements in "
        f"{_plural(len(timeline.atoms), 'bucket')}; a dense step takes {1e3 * timeline.step:.0f} ms. Predicted:"
    ]
    for mode, plan in plans.items():
        nbytes = _bytes(plan, compression, timeline)
        dense, selected, numel = plan.sent_elements if plan.buffers else (1, 0, 1)
        lines.append(
            f"  {mode:<12}{1e3 * seconds[mode]:8.0f} ms{nbytes / 1e6:10.2f} MB, {(dense + selected) / numel:6.1%} of "
            f"all elements, in {_plural(len(plan.buffers) or len(timeline.atoms), 'buffer')}"
        )
    return "\n".join(lines)


def describe_trial(mode: str, measured: Mapping[str, float]) -> str:
    """The result of a trial. mode: the chosen mode. measured: {mode: seconds of a step} of all modes of the trial."""
    times = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in measured.items())
    return f"sparsefusion: chose {mode}; measured steps: {times}"


def print_to_stderr(text: str) -> None:
    """Print to stderr: the default of `SparseFusion(report=...)`."""
    print(text, file=sys.stderr, flush=True)


def _bytes(plan: Plan, compression: CompressionSettings, timeline: Timeline) -> int:
    if plan.mode in FRAMEWORK_BUCKET_MODES:
        return timeline.numel * (2 if plan.mode == "fp16" else timeline.sent_itemsize)
    dense, sparse, _ = plan.sent_elements
    filled = sum(compression.filled(unit.k) for buffer in plan.buffers for unit in buffer.units)
    return dense * timeline.itemsize + compression.sent_bytes(sparse, timeline.itemsize, filled)


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"
