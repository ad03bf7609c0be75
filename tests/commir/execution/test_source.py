"""`Plan.source`: a plan as a readable program. Oracle: that program itself, run on ranks in a few lines of torch for each of
its words, against `execute` and against the outputs that others compute.
"""

import re
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commir import Mesh, Placement, Schedule, execute, known, place, programs
from commir.execution.state import Count
from commir.ir.monoids import MONOIDS
from commir.ir.program import WHOLE
from commir.programs.scan_programs import pass_states, summarize
from commir.programs.tiles import derive, tile_of
from commir.scheduling.placements import in_chunks
from loop_programs import assert_close, cases, mesh_of, plans


def place_of(dim):
    """(dimension, blocks around it)"""
    return dim if isinstance(dim, tuple) else (dim, 1)


def part(x, dim, number, of):
    """A view; blocks that are around it keep a dimension of their own."""
    dim, outer = place_of(dim)
    return x.unflatten(dim, (outer, of, -1)).select(dim + 1, number)


def cut(x, dim, number, of):
    first, _ = place_of(dim)
    return part(x, dim, number, of).flatten(first, first + 1).clone()


def joined(blocks, dim):
    dim, outer = place_of(dim)
    return torch.cat([x.unflatten(dim, (outer, -1)) for x in blocks], dim + 1).flatten(dim, dim + 1)


class Words:
    """The words of a printed program, on a rank."""

    def __init__(self, rank, program):
        self.rank, self.program, self.arriving = rank, program, {}

    def exchange(self, x, to, source):
        new = torch.empty(x.shape, dtype=x.dtype)
        self.arriving[id(new)] = dist.isend(x.contiguous(), to), dist.irecv(new, source)
        return new

    def wait(self, *xs):
        for message in chain(*(self.arriving.pop(id(x)) for x in xs)):
            message.wait()

    def swap(self, x, peer):
        if peer == self.rank:
            return x.clone()
        new = self.exchange(x, peer, peer)
        self.wait(new)
        return new

    def all_blocks(self, among, blocks):
        """The blocks that all ranks send to this one, of the blocks for each of them."""
        return [self.swap(block, peer) for peer, block in zip(among, blocks, strict=True)]

    def gather(self, x, among, dim):
        return joined(self.all_blocks(among, [x] * len(among)), dim)

    def all_to_all(self, x, among, cut, join):
        return joined(
            self.all_blocks(among, [globals()["cut"](x, cut, n, len(among)) for n in range(len(among))]), join
        )

    def reduce_scatter(self, monoid, xs, among, cut):
        pieces = [
            self.all_blocks(among, [globals()["cut"](x, dim, n, len(among)) for n in range(len(among))])
            for x, dim in zip(xs, cut, strict=True)
        ]
        first, *others = zip(*pieces, strict=True)
        for other in others:
            self.combine(monoid, first, other)
        return first

    def all_reduce(self, monoid, xs, among):
        first, *others = zip(*(self.all_blocks(among, [x] * len(among)) for x in xs), strict=True)
        for other in others:
            self.combine(monoid, first, other)
        return first

    def combine(self, monoid, xs, others):
        MONOIDS[monoid].combine(xs, [y.reshape(x.shape) for x, y in zip(xs, others, strict=True)])

    def neutral(self, monoid, *shapes):
        values = MONOIDS[monoid].values(len(shapes))
        return [torch.full(shape, x, dtype=torch.float64) for shape, x in zip(shapes, values, strict=True)]

    def indices(self, elements):
        """{axis: its elements}"""
        found = {axis.name: torch.arange(axis.size) for axis in self.program.axes if axis.kind != WHOLE}
        runs = {axis: [each] if isinstance(each, range) else each for axis, each in elements.items()}
        return found | {axis: torch.tensor(list(chain(*each))) for axis, each in runs.items()}

    def tile(self, *blocks, **elements):
        indices, names = self.indices(elements), [x.name for x in self.program.inputs if x.in_tile]
        inputs = {}
        for name, x in zip(names, blocks, strict=False):
            operand = self.program.operand(name)
            shape = [len(indices[a]) // operand.divisor(a) if a in indices else self.program.axis(a).size
                     for a in operand.axes]  # fmt: skip
            inputs[name] = x.reshape(shape)
        if len(blocks) > len(names):
            inputs[self.program.scan.carry] = blocks[-1]
        found = tile_of(self.program, "reference")(self.program, inputs, indices)
        found = [found[name] for result in self.program.results for name in result.outputs]
        return found if len(found) > 1 else found[0]

    def derive(self, name, *xs):
        return derive(self.program, name, xs)

    def summarize(self, *blocks, **elements):
        inputs = dict(zip([x.name for x in self.program.inputs], blocks, strict=True))
        return summarize(self.program, inputs, self.indices(elements))

    def pass_states(self, *xs):
        return pass_states(self.program, *xs)

    def narrow(self, x):
        return x

    def empty(self, shape):
        return torch.empty(shape, dtype=torch.float64)

    def write(self, x, y):
        x.copy_(y.reshape(x.shape))


def run_sources(rank, chosen, inputs):
    """[({output: this rank's block} by the printed program, and by `execute`)] of each plan."""
    found = []
    for plan in chosen:
        words = Words(rank, plan.of_one_chunk.program)
        names = {name: getattr(words, name) for name in dir(words) if not name.startswith("_")}
        space = names | {"part": part, "cut": cut}
        exec(plan.source(rank), space)
        local = plan.shard(inputs, rank)
        printed = space[f"rank_{rank}"](*(local[operand.name].clone() for operand in plan.inputs()))
        printed = printed if isinstance(printed, tuple) else (printed,)
        outputs = [operand.name for operand in plan.program.outputs]
        found.append((dict(zip(outputs, printed, strict=True)), execute(plan, local, dist.group.WORLD, Count())))
    return found


def check(ranks, chosen, case):
    """The printed programs of all ranks compute what `execute` and the case's oracle do."""
    results = ranks(run_sources, 4, chosen, case.inputs)
    for index, plan in enumerate(chosen):
        for result in results:
            assert_close(*result[index])
        assert_close(plan.unshard([result[index][0] for result in results]), case.expected)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
@pytest.mark.parametrize("number", range(8))
def test_a_printed_program_computes_what_the_plan_does(ranks, number, sizes):
    case = cases(4)[number]
    chosen = plans(case.program, mesh_of(*sizes))
    check(ranks, chosen[:: max(1, len(chosen) // 10)], case)


def test_chunks_and_loops_of_a_rank(ranks):
    """Also accumulators of which each tile computes a part, and digits that others of their axis surround."""
    case = cases(4)[0]
    grid, ring = Schedule(case.program, Mesh(x=2, y=2)), Schedule(case.program, Mesh(x=4)).tile("q", 4)
    placed = place(grid, x=Placement("kv", True), y=Placement("heads"))
    tiled = ring.parallelize("q.o", "x").tile("kv", 4).tile("kv.i", 2).tile("q.i", 2).tile("heads", 2)
    looped = tiled.shift("kv.o", "x").reorder("kv.i.o", "heads.o", "kv.o", "q.i.o")
    chosen = [in_chunks(placed, "heads", 2), in_chunks(placed, "batch", 2), looped, looped.reorder("q.i.o", "kv.o")]
    check(ranks, [schedule.lower() for schedule in chosen], case)


def test_the_text_of_a_ring():
    """As the guide shows it: peers, blocks, shapes and elements of one rank, in the order of the steps."""
    plan = known(Schedule(programs.attention(1, 8, 2, 1024, 64, dtype="bfloat16"), Mesh(gpu=2)), "ring").lower()
    page = (Path(__file__).resolve().parents[3] / "docs/guides/schedules.md").read_text()
    (shown,) = re.findall(r"^```text\n(# attention .*?)\n```", page, re.MULTILINE | re.DOTALL)
    assert plan.source(1) == shown
    with pytest.raises(ValueError, match="rank 2 is not in a mesh of 2 ranks"):
        plan.source(2)


def test_partial_results_are_printed_in_the_dtype_in_which_they_travel():
    backward = programs.attention(1, 4, 2, 64, 8, backward=True, dtype="bfloat16")
    text = known(Schedule(backward, Mesh(x=2)), "ring").lower().source()
    assert "other_dk_1 = exchange(dk_1, to=1, source=1)" in text
    assert text.endswith("return narrow(dq), narrow(dk), narrow(dv)")
    product = programs.matmul_reduce_scatter(8, 8, 8, dtype="bfloat16")
    text = known(Schedule(product, Mesh(x=2)), "AsyncTP").lower().source()
    assert "other_c_1 = exchange(narrow(c_1), to=1, source=1)" in text
