"""What commir's verifier accepts, rejects, and how long it takes (about 25 min on 2 cores).

The claims: every plan that a search can emit on up to 12 ranks is right, with errors of at most 1e-13 in float64; every
corruption of a step that raises an error or silently changes an output is rejected; the bytes of a scan do not depend on its
length, and are those of the formulas; the five best plans of attention on 64 ranks are verified in less than 20 s (on one
core, before the others).
"""

import os
import random
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.support.plans import all_plans, corrupted, effect, random_inputs
from benchmarks.support.tables import markdown, publish
from commir import Mesh, Plan, Program, Schedule, interpret, place, programs, search, verify
from commir.execution.verifier import VerificationError, smallest, unscheduled

RANKS = range(2, 13)
CORRUPTIONS = 30  # of each program
LENGTHS = 1_024, 65_536


def programs_on(ranks: int) -> dict[str, Program]:
    """Every program of the library, with sizes that divide over the ranks in each way; and heads that may not."""
    return {
        "attention": programs.attention(2, 2 * ranks, ranks, 4 * ranks, 4, dtype="float64"),
        "attention, backward": programs.attention(2, ranks, ranks, 4 * ranks, 4, backward=True, dtype="float64"),
        "attention, 8/1 heads": programs.attention(2, 8, 1, 4 * ranks, 4, dtype="float64"),
        "attention, backward, 9/3 heads": programs.attention(2, 9, 3, 4 * ranks, 4, backward=True, dtype="float64"),
        "decoding": programs.decode_attention(2, 2 * ranks, ranks, 3 * ranks, 4, dtype="float64"),
        "all-gather and product": programs.all_gather_matmul(2 * ranks, 3 * ranks, 5 * ranks, "float64"),
        "product and reduce-scatter": programs.matmul_reduce_scatter(2 * ranks, 3 * ranks, 5 * ranks, "float64"),
        "weighted sum": programs.weighted_sum(3 * ranks, 2 * ranks, "float64"),
        "scan, states in slices": programs.selective_scan(2, 4 * ranks, 2 * ranks, 2, 3, "float64"),
        "scan, states gathered": programs.selective_scan(2, 4 * ranks, 5, 2, 3, "float64"),
    }


def error(plan: Plan) -> float:
    """The largest error of a plan on random inputs of small sizes, relative to the largest element if that is above 1."""
    small = smallest(plan, whole=4, inner=2)
    inputs = random_inputs(small.program, seed=1)
    found, exact = interpret(small, inputs), unscheduled(small.program, inputs)
    return max(float((found[name] - x).abs().max() / max(1.0, float(x.abs().max()))) for name, x in exact.items())


def check_plans(name: str, ranks: int) -> tuple[int, float]:
    """(how many plans of a program on so many ranks there are, their largest error). VerificationError: one is wrong."""
    plans = all_plans(programs_on(ranks)[name], Mesh(gpu=ranks))
    for plan in plans:
        verify(plan)
    return len(plans), max(error(plan) for plan in plans)


def plans_rows() -> list[list[str]]:
    """Rows: how many plans of each program are right, and their largest error."""
    rows = []
    with ProcessPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        names = list(programs_on(2))
        jobs = {name: [pool.submit(check_plans, name, ranks) for ranks in reversed(RANKS)] for name in names}
        for name in names:
            counts, errors = zip(*(job.result() for job in jobs[name]), strict=True)
            plans = f"plans of {name} on 2 to 12 ranks"
            rows.append([plans, f"{sum(counts):,}, all verified", f"all right; error at most {max(errors):.0e}"])
    return rows


def corruptions_rows(mesh: Mesh) -> list[list[str]]:
    """Rows: how many corruptions of plans raise an error, or silently change an output, and how many are rejected."""
    generator, rejected = random.Random(0), dict[str, list[bool]](raises=[], differs=[])
    chosen = [all_plans(program, mesh) for program in programs_on(mesh.ranks).values()] * CORRUPTIONS
    for plans in chosen:
        wrong = corrupted(generator.choice(plans), generator)
        if found := effect(wrong):
            rejected[found].append(is_rejected(wrong))
    return [
        [
            f"corrupted steps on {mesh!r} that {what}",
            f"{len(rejected[found])} of {len(chosen)} tried",
            f"{sum(rejected[found])} of these rejected",
        ]
        for found, what in (("raises", "raise an error when they run"), ("differs", "silently change an output"))
    ]


def is_rejected(plan: Plan) -> bool:
    """Whether the verifier rejects a plan."""
    try:
        verify(plan)
    except VerificationError:
        return True
    return False


def scan_row(ranks: int, heads: int) -> list[str]:
    """A row: the bytes of passing states in fp32, for two lengths, and by the formula of docs/concepts/passing-states.md."""
    dim, state = 64, 128
    sent = [
        place(Schedule(programs.selective_scan(1, seq, heads, dim, state), Mesh(gpu=ranks)), gpu="seq").lower()
        for seq in LENGTHS
    ]
    s, d = heads * dim * state, heads
    is_sliced = ranks > 2 and heads % ranks == 0
    formula = 4 * ((ranks - 1) * (4 * s + 2 * d) // ranks if is_sliced else 2 * (ranks - 1) * (s + d))
    form = "slices" if is_sliced else "gathered"
    first, last = (plan.bytes_per_rank for plan in sent)
    same = "the same, and the formula's" if first == last == formula else f"{last:,}, and by the formula {formula:,}"
    lengths = " and ".join(f"{length:,}" for length in LENGTHS)
    return [f"bytes of a scan of {heads} heads on {ranks} ranks ({form}), {lengths} tokens", f"{first:,}", same]


def time_row() -> list[str]:
    """A row: the time to verify the five best plans of attention on 64 ranks."""
    best = search(programs.attention(1, 32, 8, 2**20, 128, dtype="bfloat16"), Mesh(gpu=64), top=5)
    start = time.perf_counter()
    for plan in best:
        verify(plan)
    return [
        "the five best plans of attention, 32/8 heads, on 64 ranks",
        f"{len(best)} verified",
        f"{time.perf_counter() - start:.1f} s",
    ]


def main() -> None:
    """Verify, and publish the table."""
    torch.set_num_threads(1)
    timed = time_row()
    rows = [row for mesh in (Mesh(x=4), Mesh(x=2, y=2)) for row in corruptions_rows(mesh)]
    rows += [scan_row(ranks, heads) for ranks, heads in ((2, 80), (8, 80), (64, 80))]
    publish("verification", markdown(["what", "number", "result"], [*plans_rows(), *rows, timed]))


if __name__ == "__main__":
    main()
