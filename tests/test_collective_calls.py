"""What all ranks call together. Oracle: the same error on every rank, which names the first that failed or differed.

Each entry is called with a wrong argument on the last rank, then with another valid one there, then with the same on all
ranks, which must work, and once more when the last rank has died, which must end in an error.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import commir
import megatron_ssm
import sparsefusion
import tiny
from attention2d import Ring, Tree
from commfabric.collectives.agreement import on_first, together
from commfabric.fabric.cost_model import Fabric
from commir.execution.state import Count
from commir.searching.graph_run import GraphRunner
from commir.searching.layers import transformer_layer
from fused import Net, backward, quiet
from megatron_ssm.checkpoints.folders import find_checkpoints
from megatron_ssm.checkpoints.peft import load_lora
from megatron_ssm.checkpoints.training import Snapshot, load_training
from megatron_ssm.model.adapters import remove_lora
from serving import attempt, checkpoint
from shared import die, error_of

PROMPT = torch.tensor([[1, 2, 3]])


@dataclass
class Entry:
    """A collective call. prepare(world, folder) runs before the ranks are forked, and what it returns on each rank, where it
    returns a function of keyword arguments. wrong, other: arguments of the last rank; words: what the errors say.
    """

    prepare: Callable
    wrong: dict
    wrong_words: str
    other: dict
    other_words: str


ENTRIES: dict[str, Entry] = {}


def entry(wrong=None, wrong_words="", other=None, other_words=""):
    """Add a function to ENTRIES as `Entry.prepare`; without a wrong or another argument, that part is left out."""

    def add(prepare):
        ENTRIES[prepare.__name__] = Entry(prepare, wrong or {}, wrong_words, other or {}, other_words)

    return add


@entry(dict(wrong=True), "no such file", dict(value=2), "got 2, rank 0 got 1")
def sparsefusion_together(world, folder):
    def action(value, wrong):
        if wrong:
            raise FileNotFoundError("no such file")
        return value

    return lambda rank: lambda value=1, wrong=False: together(lambda: action(value, wrong), [dist.group.WORLD], int)


@entry()
def sparsefusion_on_first(world, folder):
    return lambda rank: lambda: (on_first(lambda: rank, dist.group.WORLD), dist.barrier())


@entry()
def sparsefusion_all_reduce(world, folder):
    return lambda rank: lambda: sparsefusion.all_reduce(torch.ones(10), format="int8")


@entry(dict(fabric=Fabric(())), "all_reduce", dict(density=0.02), "density=0.02")
def sparsefusion_attach(world, folder):
    return lambda rank: lambda **options: quiet(**options).attach(DDP(Net()))


@entry(dict(state={}), "state", dict(step=7), "step=7, rank 0 got step=1")
def sparsefusion_load_state_dict(world, folder):
    def on_rank(rank):
        fusion = quiet(mode="fp16").attach(model := DDP(Net()))
        backward(model, 0, rank)
        saved = fusion.state_dict()
        return lambda state=saved, step=1: fusion.load_state_dict(state | {"step": step} if state else state)

    return on_rank


def attention(heads=4):
    return [torch.ones(1, 4, count, 8) for count in (heads, 2, 2)]


@entry(dict(heads=3), "3 query heads do not divide over 2", dict(causal=True), "causal=True, rank 0 got causal=False")
def attention2d_schedule(world, folder):
    return lambda rank: lambda heads=4, **options: Ring(dist.group.WORLD)(*attention(heads), **options)


@entry(dict(heads=3), "3 query heads do not divide over 2", dict(scale=0.5), "scale=0.5, rank 0 got scale=None")
def attention2d_tree(world, folder):
    return lambda rank: lambda heads=4, **options: Tree(dist.group.WORLD)(*attention(heads), **options)


def searched(world):
    """(a plan, whole inputs)."""
    plan = commir.search(commir.programs.attention(1, 6, 6, 12 * world, 4), commir.Mesh(gpu=world))[0]
    return plan, {operand.name: torch.ones(plan.program.shape(operand)) for operand in plan.inputs()}


@entry(
    dict(dtype=torch.int64),
    "q has dtype torch.int64",
    dict(count=Count()),
    "count='given', rank 0 got count='not given'",
)
def commir_execute(world, folder):
    plan, inputs = searched(world)

    def on_rank(rank):
        local = plan.shard(inputs, rank)
        return lambda dtype=torch.float32, **options: commir.execute(
            plan, {**local, "q": local["q"].to(dtype)}, dist.group.WORLD, **options
        )

    return on_rank


@entry(dict(dtype=torch.int64), "q has dtype torch.int64", dict(requires_grad=True), "q.requires_grad=True")
def commir_differentiable(world, folder):
    plan, inputs = searched(world)

    def on_rank(rank):
        function, local = commir.differentiable(plan, dist.group.WORLD), plan.shard(inputs, rank)
        return lambda dtype=torch.float32, requires_grad=False: function(
            local["q"].to(dtype).requires_grad_(requires_grad), local["k"], local["v"]
        )

    return on_rank


@entry(other=dict(dtype=torch.float32), other_words="torch.float32")
def commir_graph(world, folder):
    operator = replace(transformer_layer(2, 4 * world, 8, 4, 4, 16, dtype="float64")[0], inputs={})
    plans = commir.search_graph([operator], commir.Mesh(gpu=world)).plans()
    plan = plans[operator.name]
    inputs = {each.name: torch.ones(plan.program.shape(each), dtype=torch.float64) for each in plan.inputs()}

    def on_rank(rank):
        runner = GraphRunner([operator], plans, dist.group.WORLD)
        local = plan.shard(inputs, rank)
        return lambda dtype=torch.float64: runner({operator.name: {name: x.to(dtype) for name, x in local.items()}})

    return on_rank


@entry(other=dict(repeated=2), other_words="repeated=2, rank 0 got repeated=1")
def commir_fastest(world, folder):
    plan, _ = searched(world)
    return lambda rank: lambda repeated=1: commir.fastest([plan], dist.group.WORLD, repeated)


@entry(other=dict(ranks=5), other_words="ranks=5, rank 0 got ranks=4")
def commir_measure_tile(world, folder):
    plan, _ = searched(world)
    return lambda rank: lambda ranks=4: commir.measure_tile(plan.program, ranks, dist.group.WORLD)


@entry(dict(directory="none"), "none", dict(dtype=torch.float64), "dtype=torch.float64, rank 0 got dtype=torch.float32")
def megatron_ssm_load(world, folder):
    directory = checkpoint("mamba2")
    return lambda rank: (
        lambda **options: megatron_ssm.load(
            **{"directory": directory, "group": dist.group.WORLD, "dtype": torch.float32} | options
        )
    )


def with_model(call):
    """An entry of a model that is loaded before."""
    directory = checkpoint("mamba2")

    def on_rank(rank):
        model = megatron_ssm.load(directory, dist.group.WORLD)
        return lambda **options: call(model, **options)

    return on_rank


@entry(dict(directory=None), "NoneType", dict(file_bytes=1000), "rank 0 got ")
def megatron_ssm_save(world, folder):
    return with_model(lambda model, directory=folder, **options: megatron_ssm.save(model, directory, **options))


@entry(dict(directory="none"), "none/adapter_config.json")
def megatron_ssm_load_lora(world, folder):
    model = megatron_ssm.load(checkpoint("mamba2"))
    megatron_ssm.add_lora(model, 2, 4.0, ["in_proj"])
    megatron_ssm.save_lora(model, folder)

    def call(model, directory=folder):
        load_lora(model, directory)
        remove_lora(model)

    return with_model(call)


@entry(
    dict(temperature=-1.0), "temperature=-1.0 must be", dict(max_new_tokens=3), "rank 0 got request 0: max_new_tokens=2"
)
def megatron_ssm_generate(world, folder):
    return with_model(lambda model, **options: megatron_ssm.generate(model, PROMPT, **{"max_new_tokens": 2} | options))


@entry(dict(num_beams=0), "num_beams=0", dict(num_beams=2), "rank 0 got ")
def megatron_ssm_model_generate(world, folder):
    return with_model(lambda model, **options: model.generate(PROMPT, max_new_tokens=2, **options))


@entry(dict(prompt=[-1]), "token id -1", dict(seed=6), "got request 0: seed=6, rank 0 got")
def megatron_ssm_engine_add(world, folder):
    def call(model, **options):
        engine = megatron_ssm.Engine(model)
        return list(engine.stream(engine.add(**{"prompt": [1, 2], "max_new_tokens": 2, "seed": 5} | options)))

    return with_model(call)


@entry(dict(token=-1), "token id -1", dict(length=8), "input_ids=(1, 8), rank 0 got input_ids=(1, 16)")
def megatron_ssm_on_context_ranks(world, folder):
    directory = checkpoint("mamba2")

    def on_rank(rank):
        model = megatron_ssm.load(directory, context=Ring(dist.group.WORLD))
        return lambda token=1, length=16: model(torch.full((1, length), token))

    return on_rank


@entry(dict(path="none"), "none", dict(step=2), "step-000002 with")
def megatron_ssm_resume(world, folder):
    trainer = tiny.trainer(tiny.options(num_layers=1))
    for step in (1, 2):
        tiny.curve(trainer, 1)
        Snapshot.of(folder, step, trainer.model, trainer.optimizer, {}).write()
    saved = find_checkpoints(folder)

    def on_rank(rank):
        trainer = tiny.trainer_on(1, tiny.options(num_layers=1, global_batch_size=2 * world))
        return lambda step=1, path=None: load_training(path or saved[step - 1], step, trainer.model, trainer.optimizer)

    return on_rank


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("name", ENTRIES)
def test_a_collective_call(ranks, world, name, tmp_path):
    tested = ENTRIES[name]
    on_rank, last = tested.prepare(world, tmp_path), world - 1

    def run(rank):
        call = on_rank(rank)
        failures = [attempt(call, **(changes if rank == last else {})) for changes in (tested.wrong, tested.other)]
        call()
        kind = None if rank == last else error_of(call)[0]
        die()  # as after an error that nobody catches, by which others learn of it
        return failures, kind

    answers = ranks(run, world, timeout=30)
    (_, failed), (kind, differed) = (failure or ("", "") for failure in answers[0][0])
    assert all(failures == answers[0][0] for failures, _ in answers)
    if tested.wrong:
        assert tested.wrong_words in failed and failed.endswith(f" (rank {last})") and "\n" not in failed
    if tested.other:
        assert kind == "ValueError" and differed.startswith(f"arguments differ across ranks: rank {last} got ")
        assert tested.other_words in differed and "\n" not in differed
    assert bool(failed) == bool(tested.wrong) and bool(differed) == bool(tested.other)
