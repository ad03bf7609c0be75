"""`advise`. Oracles: what the ranks of a model count while it trains; the memory of its parts; times worked out by hand."""

import contextlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from chosen import by_default
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

import tiny
from attention2d.schedules.choosing import candidates
from attention2d.schedules.family import named_grids
from commfabric.collectives.shared_memory import kernels as native_sums
from commfabric.fabric.curve import Curve
from commfabric.fabric.fitting import Segment
from megatron_ssm import families
from megatron_ssm.cli.main import main
from megatron_ssm.engine.generation import stream
from megatron_ssm.kernels import kernels
from megatron_ssm.layers.tape_run import BoundCall
from megatron_ssm.model.activations import TrainingMemory
from megatron_ssm.model.advise import block_outputs
from megatron_ssm.model.context import schedule_of
from megatron_ssm.model.memory import Memory
from megatron_ssm.plan import measured as measured_times
from megatron_ssm.plan.command import as_json, generation_text, training_text, why
from megatron_ssm.plan.devices import DEVICES, Device
from megatron_ssm.plan.divisions import Generation, Training, generation_divisions, training_divisions
from megatron_ssm.plan.measured import REPEATED, MeasuredDevice, part_of
from megatron_ssm.plan.traffic import (
    AGREEMENT_BYTES,
    WIRE_FORMATS,
    Message,
    Sums,
    agreed_tokens,
    attended_tokens,
    backward_sums,
    chosen_tokens,
    dispatched_tokens,
    exact_sums,
    expert_gradients,
    expert_outputs,
    gradient_sums,
    passed_states,
    replicated_gradients,
    seconds_after_backward,
    seconds_of,
    seconds_of_attention,
)
from megatron_ssm.spec.reader import QUANTIZATION
from megatron_ssm.train.options import CONTEXT_SCHEDULES, parse_options
from sparsefusion import Fabric

MODELS = {
    "mamba": dict(model_type="mamba"),
    "mamba2": {},
    "mamba2, groups": dict(mamba_num_groups=2),
    "falcon": dict(model_type="falcon_mamba"),
    "zamba": tiny.ZAMBA,
    "zamba2": tiny.ZAMBA2,
}
EXPERTS = dict(hybrid_override_pattern="ME", num_experts=4, moe_router_topk=4)
SEQ, BATCH, NORM_BYTES = 16, 2, 4  # the last: of the gradient's norm, which the ranks sum once per step


def options(**changes):
    return tiny.options(
        **{
            "params_dtype": "float32",
            "seq_length": SEQ,
            "micro_batch_size": BATCH,
            "global_batch_size": BATCH,
            **changes,
        }
    )


def config_of(**changes):
    return families.from_dict(options(**changes).new_config(64, 0))


def counted(rank, tp, changes):
    """(bytes that this rank's collectives take in a step of training, bytes that it sends in exchanges)."""
    run = options(**changes)
    made = tiny.trainer_on(tp, run, vocab=64)
    made.model.counter.reset()
    made.step(tiny.batches(run, vocab=64), 0)
    return made.model.counter.nbytes, made.model.counter.sent


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", (2, 4))
def test_tensor_parallel_sums_of_a_step(ranks, tp, name):
    if name == "zamba" and tp == 4:
        pytest.skip("2 mamba heads on 4 ranks need sums of their own, which the prediction leaves out")
    config, rows = config_of(**MODELS[name]), SEQ * BATCH
    of_blocks = [(rows * nbytes, count) for nbytes, count in block_outputs(config, tp)]
    messages = [Message("all_reduce", nbytes, tp, count) for nbytes, count in of_blocks]
    messages += [*exact_sums(config, tp, rows), *backward_sums(config, tp, rows), *replicated_gradients(config, tp)]
    predicted = sum(each.nbytes * each.count for each in messages)
    assert {nbytes - NORM_BYTES for nbytes, _ in ranks(counted, tp, tp, MODELS[name])} == {predicted}


@pytest.mark.parametrize("name", ("mamba", "mamba2"))
@pytest.mark.parametrize("world", (2, 4))
def test_states_that_context_ranks_pass(ranks, world, name):
    """The prediction is for a rank whose blocks both have a successor on another rank; some ranks send less."""
    changes = dict(MODELS[name], context_parallel_size=world, seq_length=32)
    config = config_of(**MODELS[name])
    predicted = sum(
        each.nbytes * each.count * ((world - 1) / world if each.operation == "all_to_all" else 1)
        for each in passed_states(config, 1, world, BATCH, True)
    )
    sent = max(sent for _, sent in ranks(counted, world, 1, changes))
    assert 0.9 * sent <= predicted <= 1.4 * sent


def counted_tokens(rank, tp, context, changes, tokens=3):
    """Bytes that this rank's collectives take for a decoded token."""
    model = tiny.trainer_on(tp, options(**changes, context_parallel_size=context, seq_length=32), vocab=64).model
    ids = torch.randint(64, (1, 32), generator=torch.Generator().manual_seed(0))
    replies = stream(model, ids, max_new_tokens=2 + tokens)
    next(replies), next(replies)
    model.counter.reset()
    for _ in range(tokens):
        next(replies)
    return model.counter.nbytes / tokens


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp, context", [(2, 1), (1, 2), (1, 4), (2, 2)])
def test_messages_of_a_decoded_token(ranks, tp, context, name):
    """Those that compare arguments are not counted."""
    config = config_of(**MODELS[name])
    messages = [Message("all_reduce", nbytes, tp, count) for nbytes, count in block_outputs(config, tp) if tp > 1]
    messages += [*exact_sums(config, tp, 1), *attended_tokens(config, 1, tp, context), *chosen_tokens(1, tp)]
    messages += agreed_tokens(1, context)
    predicted = sum(each.nbytes * each.count for each in messages if each.ranks > 1 and each.nbytes != AGREEMENT_BYTES)
    assert set(ranks(counted_tokens, tp * context, tp, context, MODELS[name])) == {predicted}


@pytest.mark.parametrize("world, tp, ep", [(2, 1, 2), (4, 1, 4), (4, 2, 2)])
@pytest.mark.parametrize("latent", (0, 10))
def test_tokens_that_go_to_experts_in_a_step(ranks, world, tp, ep, latent):
    """Each token chooses experts of all ranks. Beside the tokens, the gradient's norm of the experts is summed."""
    changes = dict(EXPERTS, moe_latent_size=latent, global_batch_size=BATCH * world // tp)
    messages = dispatched_tokens(config_of(**changes), tp, ep, SEQ * BATCH)
    predicted = sum(each.nbytes * each.count for each in messages)
    whole, divided = (
        ranks(counted, world, tp, dict(changes, expert_model_parallel_size=experts)) for experts in (1, ep)
    )
    more = {mine[0] - before[0] - NORM_BYTES for mine, before in zip(divided, whole, strict=True)}
    assert more == {predicted}


@pytest.mark.parametrize("tp, ep", [(1, 2), (1, 4), (2, 2)])
def test_messages_of_a_token_whose_experts_are_on_several_ranks(ranks, tp, ep):
    config = config_of(**EXPERTS)
    messages = [Message("all_reduce", nbytes, ep, count) for nbytes, count in expert_outputs(config, tp, ep)]
    messages += agreed_tokens(1, ep)
    more = sum(each.nbytes * each.count for each in messages)
    alone = ranks(counted_tokens, tp, tp, 1, EXPERTS)[0]
    changes = dict(EXPERTS, expert_model_parallel_size=ep, global_batch_size=BATCH * ep)
    assert set(ranks(counted_tokens, tp * ep, tp, 1, changes)) == {alone + more}


@pytest.mark.parametrize("tp, ep", [(1, 2), (2, 2)])
def test_the_part_of_a_model_with_divided_experts(tp, ep):
    config = config_of(**EXPERTS)
    part = part_of(config, tp, torch.device("cpu"), torch.float32, ep)
    assert sum(each.nbytes for each in part.parameters()) == Memory(config, tp, 4, expert_ranks=ep).weights


@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("name", ("mamba", "mamba2, groups", "falcon"))
def test_the_part_of_a_model_has_the_weights_of_a_rank(name, tp):
    config = config_of(**MODELS[name])
    part = part_of(config, tp, torch.device("cpu"), torch.float32)
    if name == "mamba2, groups" and tp == 4:
        assert part.layers[0].mixer.groups == 1  # two ranks hold the same group
    assert sum(parameter.nbytes for parameter in part.parameters()) == Memory(config, tp, 4).weights


# Times by hand

ALPHA, BETA = 1e-4, 1e-8  # seconds, and seconds per byte
MB = 2**20


def fabric(alpha=ALPHA, beta=BETA, operations=("all_reduce", "all_gather", "all_to_all", "p2p")):
    """Every operation takes alpha + beta * nbytes, on 2 and on 4 ranks."""
    sizes = (1024, 2**24)
    times, segment = tuple(alpha + beta * nbytes for nbytes in sizes), Segment(*sizes, alpha, beta)
    return Fabric(tuple(
        Curve(name, ranks, "eager", sizes, times, (), (), (segment,), (0.0, 0.0)) for name in operations for ranks in (2, 4)
    ))  # fmt: skip


class Fixed:
    """A device on which every pass takes a second and every token a millisecond, divided by the ranks of a layer."""

    name, memory, itemsize, wait = "fixed", 1e12, 4, 0.0

    def sums(self, fabric, ranks):
        return Sums(fabric, self.wait)

    def forward(self, config, ranks, batch, tokens, seq, experts=1):
        return batch * tokens / seq / ranks

    def micro_batch(self, config, ranks, batch, tokens, seq):
        return self.forward(config, ranks, batch, tokens, seq), 2 * self.forward(config, ranks, batch, tokens, seq)

    def passing(self, config, ranks, batch, tokens):
        return 0.125, 0.25

    def optimizer(self, config, ranks, experts=1):
        return 0.0

    def token(self, config, ranks, batch, length, experts=1):
        return 1e-3 / ranks


def test_the_times_of_a_step_by_hand():
    """Two data-parallel ranks: three seconds for each of two sequences, and one bucket of gradients behind backward."""
    config = config_of(model_type="mamba")
    found = training_divisions(config, 2, Training(64, 4), fabric(), Fixed())
    by_sizes = {(each.tensor, each.context, each.data): each for each in found}
    sums = ALPHA + BETA * Memory(config, 1, 4).weights
    assert by_sizes[1, 1, 2].seconds == pytest.approx(2 * 3 + sums)
    mixer = config.layers[0][0].operators[0].spec
    tokens, hidden, layers, x_proj = 64, config.hidden_size, config.num_layers, mixer.dt_rank + 2 * mixer.state_size
    messages = (2 * layers + 2) * (ALPHA + BETA * 4 * tokens * hidden)
    messages += 2 * layers * (ALPHA + BETA * 4 * tokens * x_proj) + 3 * (ALPHA + BETA * 4 * tokens)
    norms = ALPHA + BETA * 4 * (layers + 1) * hidden
    assert by_sizes[2, 1, 1].seconds == pytest.approx(4 * (1.5 + messages) + norms)
    assert found[0] is by_sizes[1, 1, 2] and "TP" in why(found[0], found[1])


def test_buckets_of_gradients_by_hand():
    """A megabyte, then 25 at a time; the embedding is ready last, and as a whole."""
    sizes = [each.nbytes for each in gradient_sums(80 * MB, 2, 5 * MB)]
    assert sizes == [MB, 25 * MB, 25 * MB, 29 * MB] and not list(gradient_sums(80 * MB, 1))
    per_bucket = [beta * nbytes for beta, nbytes in zip([1e-8] * 4, sizes, strict=True)]
    fast = fabric(0.0, 1e-8)  # a bucket is summed before the next one is ready, so only the last one is left
    assert seconds_after_backward(80 * MB, 5 * MB, 2, 100.0, fast) == pytest.approx(per_bucket[-1])
    assert seconds_after_backward(80 * MB, 5 * MB, 2, 100.0, fast, wait=0.5) == pytest.approx(per_bucket[-1] + 0.5)
    slow = fabric(0.0, 1e-3)  # all wait for the first one, which is ready after 1/75 of backward
    first = 100.0 / 75
    assert seconds_after_backward(80 * MB, 5 * MB, 2, 100.0, slow) == pytest.approx(1e-3 * 80 * MB + first - 100.0)


def buckets(rank, changes):
    """The bytes of the buckets in which DDP sums gradients, once it knows their order."""
    run = options(micro_batch_size=1, global_batch_size=dist.get_world_size(), **changes)
    made, sizes = tiny.trainer_on(1, run, vocab=512), []

    def hook(group, bucket):
        sizes.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    made.loss.register_comm_hook(None, hook)
    for step in range(2):
        sizes.clear()
        made.step(tiny.batches(run, vocab=512), step)
    return sizes


@pytest.mark.parametrize("world", (2, 3))
def test_buckets_of_gradients_are_those_of_ddp(ranks, world):
    """A bucket that DDP closes may be larger by one gradient."""
    changes = dict(hidden_size=256, num_layers=2)
    config = families.from_dict(options(**changes).new_config(512, 0))
    channels = config.layers[0][0].operators[0].spec.channels
    largest = 4 * config.hidden_size * 2 * channels * 1.2  # in_proj has some more rows
    expected = [
        each.nbytes for each in gradient_sums(Memory(config, 1, 4).weights, world, 4 * 512 * config.hidden_size)
    ]
    for found in ranks(buckets, world, changes):
        assert len(found) == len(expected) == 2 and sum(found) == sum(expected)
        assert abs(found[0] - expected[0]) <= largest


@pytest.mark.parametrize("name, messages", [("mamba2", 2 * 3 * 2), ("zamba2", 2 * 3 * 2 + 2 * 3)])
def test_every_message_of_context_ranks_waits(name, messages):
    """In each pass, a layer sends three; two ranks of a ring send keys and values once, and in backward twice."""
    config = config_of(**MODELS[name] | {"num_layers": 2})
    waits = type("Waits", (Fixed,), {"wait": 1.0})()
    of = [
        {each.sizes: each.parts for each in training_divisions(config, 2, Training(64, 2), fabric(), device)}
        for device in (Fixed(), waits)
    ]
    more = {part: time - of[0]["TP 1 x CP 2 x DP 1"][part] for part, time in of[1]["TP 1 x CP 2 x DP 1"].items()}
    assert more["context ranks"] == pytest.approx(2 * messages) and more["sums of gradients"] == pytest.approx(1)


def test_slow_links_choose_other_divisions_than_fast_ones():
    config, job = config_of(hidden_size=64), Generation(64, 32)
    fast, slow = (generation_divisions(config, 4, job, fabric(alpha), Fixed())[0] for alpha in (1e-9, 1.0))
    assert (fast.tensor, slow.tensor) == (4, 1) and slow.data == 4
    first = training_divisions(config, 4, Training(64, 4), fabric(1e-9, 1e-4), Fixed())[0]
    assert first.tensor == 1  # sums of activations take longer than those of gradients


def too_small_for_the_whole(config, job):
    """A `Fixed` device whose memory is enough for the model on two ranks, but not on one."""
    found = generation_divisions(config, 2, job, fabric(), Fixed())
    divided = [each.memory for each in found if each.tensor * each.expert == 2]
    return type("Small", (Fixed,), {"memory": max(divided)})()


@pytest.mark.parametrize("alpha, is_tensor", ((1e-4, True), (1e-2, False)))
def test_tensor_or_expert_parallel_replies_by_hand(alpha, is_tensor):
    """TP 2 computes a token in 0.5 ms and sends 3 sums; EP 2 takes 1 ms, and 1 sum. Both agree on the token by a message."""
    config, job = config_of(**EXPERTS, hidden_size=64), Generation(64, 32)
    device = too_small_for_the_whole(config, job)
    first, second, *others = generation_divisions(config, 2, job, fabric(alpha, 1e-12), device)
    by_sizes = {each.sizes: each for each in (first, second)}
    tensor, expert = by_sizes["TP 2 x CP 1 x DP 1"], by_sizes["TP 1 x CP 1 x DP 2, EP 2"]
    assert tensor.tpot == pytest.approx(0.5e-3 + 4 * alpha, rel=1e-4)
    assert expert.tpot == pytest.approx(1e-3 + 2 * alpha, rel=1e-4)
    assert first is (tensor if is_tensor else expert) and all(each.excluded for each in others)
    command = generation_text([first, second], job, False).splitlines()[1].split()
    assert command == (["--tp", "2"] if is_tensor else ["--tp", "1", "--ep", "2"])


def test_replicas_whose_experts_ranks_divide():
    config, job = config_of(**EXPERTS), Generation(64, 32)
    found = {each.sizes: each for each in generation_divisions(config, 4, job, fabric(), Fixed())}
    text = generation_text([found["TP 1 x CP 1 x DP 4, EP 2"]], job, False)
    assert "--ep 2" in text and "2 replicas, each on 2 ranks of its own: serve --replicas 2 --tp 1 --ep 2\n" in text
    assert not any("EP" in sizes for sizes in found if "CP 1" not in sizes)  # `generate` has one of them


def test_a_step_with_divided_experts_by_hand():
    """Half of the data ranks hold the same experts. Tokens and sums travel in both directions, after the tokens' numbers."""
    config, job = config_of(**EXPERTS), Training(SEQ, 8, BATCH)
    found = {each.sizes: each for each in training_divisions(config, 4, job, fabric(), Fixed())}
    division, whole = found["TP 1 x CP 1 x DP 4, EP 2"], found["TP 1 x CP 1 x DP 4"]
    size, chosen, tokens = config.hidden_size, 4, SEQ * BATCH
    row, numbers = 4 * size, 4 * chosen
    rows = 2 * tokens * (4 * row + 2 * numbers + 4 * chosen)  # to both ranks; the indices only in forward
    assert division.parts["tokens to experts"] == pytest.approx(5 * ALPHA + BETA * (rows + 2 * 8))
    gradients = [*expert_gradients(config, 1, 2, 2)]
    assert [each.ranks for each in gradients] == [2, 2]
    assert 2 * sum(each.nbytes for each in gradients) == 4 * 4 * 2 * size * 4 * size  # up and down of 4 experts
    shape = TrainingMemory(config, expert_ranks=2)
    assert division.memory == shape.step(BATCH, SEQ) and division.gradients == "dense"
    assert "--expert-model-parallel-size 2" in training_text([division, whole], job, False)


def test_formats_are_advised_where_they_pay():
    config, job = config_of(hidden_size=64), Generation(64, 32)
    of = {
        beta: {each.tensor: each for each in generation_divisions(config, 4, job, fabric(1e-9, beta), Fixed())}
        for beta in (1e-13, 1e-5)
    }
    assert (of[1e-13][4].format, of[1e-5][4].format, of[1e-5][1].format) == ("fp32", "int8", "fp32")


def test_what_does_not_fit_is_excluded():
    config = config_of(**tiny.ZAMBA2)
    found = training_divisions(config, 16, Training(64, 8), fabric(), Fixed())
    reasons = {each.sizes: each.excluded for each in found if each.excluded}
    assert "is not a multiple of" in reasons["TP 1 x CP 1 x DP 16"] and "TP 16 x CP 1 x DP 1" in reasons
    small = type("Small", (Fixed,), {"memory": 1.0})()
    found = training_divisions(config, 2, Training(64, 8), fabric(), small)
    assert all("GB with --recompute-activations; a rank has 1e-09 GB" in each.excluded for each in found)
    content = as_json(found, Training(64, 8))
    assert content["runner_up"] is content["best"] is None
    assert content["reason"] == (
        "no division is possible; a rank needs less memory with more ranks, or a smaller --micro-batch-size or --seq-length"
    )
    assert all(each["seconds"] is each["format"] is None and each["memory"] for each in content["all"])
    assert training_text(found, Training(64, 8), False).startswith(f"training: {content['reason']}\n  TP ")
    found = generation_divisions(config, 2, Generation(64, 8), fabric(), small)
    assert as_json(found, Generation(64, 8))["reason"].endswith("with more ranks, or a smaller --batch or --prompt")


def test_the_table_shows_what_is_known(files, capsys):
    """Divisions that are not possible have no numbers, and their reasons are below the table."""
    assert main([*command_of(files), "--ranks", "16", "--seq-length", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(re.fullmatch(r"  TP 16 x CP 1 x DP 1 +- +- +- +-", line) for line in lines)
    assert any(re.match(r"  TP 16 x CP 1 x DP 1: .* do not divide over 16 ", line) for line in lines)
    assert main([*command_of(files), "--ranks", "1", "--memory-gb", "1e-6"]) == 1
    out, err = capsys.readouterr()
    assert "zamba2 on 1 rank, " in out and "no division over 1 rank is possible" in err


def test_a_schedule_that_is_not_the_default_is_in_the_command():
    """Behind links of high latency, one with fewer messages than that with the fewest bytes. Oracle: pretrain.py's names."""
    config, job = config_of(**tiny.ZAMBA2), Training(64, 4)
    found = [each for each in training_divisions(config, 4, job, fabric(20.0, 1e-12), Fixed()) if each.context == 4]
    (division,) = found
    assert division.schedule not in ("auto", "search") and division.schedule in CONTEXT_SCHEDULES
    rows, cols, ulysses, _ = named_grids(4)[division.schedule]
    assert division.attention == f"{rows} x {cols}" + f", {ulysses} ranks divide the heads" * (ulysses > 1)
    command = training_text(found, job, False).splitlines()[1].split()
    options = parse_options(["--data", "text", "--out", "out", *command])
    assert options.context_schedule == division.schedule


@pytest.mark.parametrize("name", ("mamba2", "zamba2"))
def test_the_memory_of_a_reply_counts_the_cache_once(name):
    """Context ranks hold half of the prompt's keys and values, and half of those of the 31 tokens, rounded up."""
    config, job = config_of(**MODELS[name]), Generation(64, 31, batch=3)
    found = {(each.tensor, each.context): each for each in generation_divisions(config, 2, job, fabric(), Fixed())}
    for sizes, tokens, new in (((1, 1), 64, 31), ((2, 1), 64, 31), ((1, 2), 32, 16)):
        shape = Memory(config, sizes[0], Fixed.itemsize)
        expected = shape.weights + shape.prefill(3, tokens) + 3 * new * shape.keys_and_values_per_token
        assert found[sizes].memory == expected


@pytest.mark.parametrize("operations", (("all_reduce",), ("all_reduce", "all_gather"), ("all_reduce", "p2p")))
def test_attention_on_a_fabric_without_some_operations(operations):
    """As `sparsefusion fit --all-reduce` makes it. By hand: in a ring, two ranks send keys and values of 32 tokens once."""
    config, some = config_of(**tiny.ZAMBA2), fabric(operations=operations)
    attention = config.attentions[0]
    nbytes = 4 * 2 * 32 * attention.kv_heads * attention.head_dim
    one = ALPHA + BETA * nbytes if len(operations) > 1 else (ALPHA + BETA * 2 * nbytes) / 2
    shape = 1, attention.heads, attention.kv_heads, attention.head_dim
    ring = next(each for each in candidates(2, *shape[1:], 64) if each.rows == 2)
    assert seconds_of_attention(ring, 2, 64, shape, False, some) == pytest.approx(one)
    found = training_divisions(config, 4, Training(64, 4), some, Fixed())
    found += generation_divisions(config, 4, Generation(64, 8), some, Fixed())
    assert not any("operation" in each.excluded for each in found)
    assert {each.context for each in found if not each.excluded} == {1, 2, 4}


def chosen_by_generate(rank, config, prompt):
    """The grid of the schedule that `generate --cp` takes."""
    grid = schedule_of("auto", dist.group.WORLD, config, 1, prompt, 1, training=False).grid
    return f"{grid.rows} x {grid.cols}" + f", {grid.ulysses} ranks divide the heads" * (grid.ulysses > 1)


@pytest.mark.parametrize("alpha", (1e-9, 20.0))
@pytest.mark.parametrize("world", (2, 4))
def test_a_reply_is_predicted_with_the_schedule_of_generate(ranks, world, alpha):
    """Whatever the fabric: the command has no option for another one."""
    config, job = config_of(**tiny.ZAMBA2), Generation(64, 8)
    found = generation_divisions(config, world, job, fabric(alpha, 1e-12), Fixed())
    (division,) = [each for each in found if each.context == world]
    assert {division.attention} == set(ranks(chosen_by_generate, world, config, job.prompt))
    assert division.schedule == "auto" and f"in a grid of {division.attention}" in generation_text(
        [division], job, False
    )


def test_replicas_come_with_how_to_start_them():
    config, slow = config_of(hidden_size=64), fabric(1.0)
    found = generation_divisions(config, 4, Generation(64, 32), slow, Fixed())
    text = generation_text(found, Generation(64, 32), False)
    assert "\n  4 replicas, each on 1 rank of its own: serve --replicas 4 --tp 1\n" in text
    (shared,) = [each for each in found if (each.tensor, each.data) == (2, 2)]
    assert "2 replicas, each on 2 ranks of its own: serve --replicas 2 --tp 2\n" in generation_text(
        [shared], Generation(64, 32), False
    )
    (one,) = [each for each in found if each.tensor == 4]
    assert "replica" not in generation_text([one], Generation(64, 32), False)


def test_the_most_tokens_per_second_are_named():
    """Here tensor parallelism shortens a reply, and replicas answer more of them. Oracle: by hand, from TTFT and TPOT."""
    by_ranks = type("ByRanks", (Fixed,), {"token": lambda self, config, ranks, *_: 1e-3 / ranks**0.5})()
    job = Generation(64, 32, batch=3)
    found = generation_divisions(config_of(hidden_size=64), 4, job, fabric(), by_ranks)
    (most,) = [each for each in found if each.data == 4]
    throughput = 4 * 3 * 32 / (most.ttft + 31 * most.tpot)
    assert found[0].tensor == 4 and found[0].throughput(job) < throughput == pytest.approx(most.throughput(job))
    lines = generation_text(found, job, False).splitlines()
    assert lines[2].startswith("  most tokens per second: TP 1 x CP 1 x DP 4: TTFT ")
    assert f", {throughput:,.0f} tokens/s, " in lines[2] and lines[2].endswith("own: serve --replicas 4 --tp 1")
    assert as_json(found, job)["best"]["tokens_per_s"] == found[0].throughput(job)


def test_the_memory_of_a_draft_head():
    """Of the head, its copy of the vocabulary, its keys and values, and the hidden states that it reads."""
    raw = dict(tiny.RAW["qwen3_5_text"], hidden_size=64, mtp_num_hidden_layers=1)
    config, plain = families.from_dict(raw), Generation(64, 32)
    job = replace(plain, draft_head=True)
    without, found = (
        {each.sizes: each for each in generation_divisions(config, 2, each, fabric(), Fixed())} for each in (plain, job)
    )
    sizes, shape = "TP 2 x CP 1 x DP 1", Memory(config.with_draft_head(), 2, Fixed.itemsize)
    own = shape.weights - Memory(config, 2, Fixed.itemsize).weights
    kept = shape.keys_and_values_per_token - Memory(config, 2, Fixed.itemsize).keys_and_values_per_token
    assert own > 0 and found[sizes].memory - without[sizes].memory == own + 96 * kept
    assert found[sizes].seconds == without[sizes].seconds
    assert "not supported on context ranks" in found["TP 1 x CP 2 x DP 1"].excluded
    assert "--draft-head" in generation_text([found[sizes]], job, False)


def test_context_ranks_decode_with_their_share_of_the_prompt():
    by_length = type(
        "ByLength", (Fixed,), {"token": lambda self, config, ranks, batch, length, experts: 1e-3 * length}
    )()
    for name in ("mamba", "zamba2"):
        found = generation_divisions(config_of(**MODELS[name]), 4, Generation(64, 9), fabric(), by_length)
        times = {each.context: each.parts["tokens, computed"] for each in found if not each.excluded}
        assert times == pytest.approx({1: 8 * 0.064, 2: 8 * 0.032, 4: 8 * 0.016})


def test_many_ranks_are_divided_at_once():
    """A number of ranks by mistake, which is a prime: all its divisions are listed, with their reasons."""
    prime = 2**31 - 1
    found = training_divisions(config_of(), prime, Training(64, 4), fabric(), Fixed())
    assert {(each.tensor, each.context, each.data) for each in found} == {(prime, 1, 1), (1, prime, 1), (1, 1, prime)}
    found = generation_divisions(config_of(), 12, Generation(64, 4), fabric(), Fixed())
    sizes = {(each.tensor, each.context, each.data) for each in found}
    assert sizes == {(a, b, c) for a, b, c in itertools.product(range(1, 13), repeat=3) if a * b * c == 12}


def test_gradients_are_sparse_where_their_residuals_fit():
    """On a slow fabric, where dense sums take most of a step."""
    config, job = config_of(hidden_size=64), Training(64, 4)
    found = {(each.tensor, each.data): each for each in training_divisions(config, 2, job, fabric(20.0), Fixed())}
    usual = found[1, 2]
    assert usual.gradients == "auto"
    assert usual.memory == TrainingMemory(config).step(1, 64, has_residuals=True)
    less = type("Less", (Fixed,), {"memory": usual.memory - 1})()
    found = {(each.tensor, each.data): each for each in training_divisions(config, 2, job, fabric(20.0), less)}
    assert found[1, 2].gradients == "dense" and found[1, 2].memory == TrainingMemory(config).step(1, 64)


def test_recomputation_where_activations_do_not_fit():
    config = config_of(hidden_size=64, num_layers=8)
    usual = training_divisions(config, 1, Training(512, 4), fabric(), Fixed())[0]
    less = type("Less", (Fixed,), {"memory": usual.memory * 0.7})()
    found = training_divisions(config, 1, Training(512, 4), fabric(), less)[0]
    assert not usual.recompute and found.recompute and found.memory < usual.memory
    assert found.seconds == pytest.approx(usual.seconds + 4)


def test_operations_that_were_not_measured_are_estimated_by_others():
    """As for the H100 measurements, which have no all-to-all and no messages between pairs."""
    some = fabric(operations=("all_reduce", "all_gather", "reduce_scatter"))
    assert seconds_of([Message("all_to_all", 1e6, 4)], some) == pytest.approx(ALPHA + BETA * 1e6)
    assert seconds_of([Message("p2p", 1e6, 4)], some) == pytest.approx(ALPHA + BETA * 1e6)
    only = fabric(operations=("all_reduce",))
    assert seconds_of([Message("all_to_all", 1e6, 4)], only) == pytest.approx((ALPHA + BETA * 1e6) / 2)
    assert seconds_of([Message("all_gather", 1e6, 4)], only) == pytest.approx((ALPHA + BETA * 4e6) / 2)
    assert seconds_of([Message("p2p", 1e6, 4)], only) == pytest.approx((ALPHA + BETA * 2e6) / 2)
    with pytest.raises(ValueError, match=r"all_reduce \(eager\) was never measured on"):
        seconds_of([Message("all_reduce", 1e6, 4)], fabric(operations=("p2p",)))


def test_a_gpu_by_its_rates():
    """A token reads the weights; a prompt multiplies by them; with half of the rate, times double."""
    config = config_of(hidden_size=64)
    gpu, slower = Device("gpu", 1e9, 1e9, 1e9, 0.0), Device("slower", 1e9, 0.5e9, 0.5e9, 0.0)
    shape = Memory(config, 1, 2)
    assert gpu.token(config, 1, 1, 0) == pytest.approx(
        (shape.weights_read_per_token + 2 * shape.state_per_sequence) / 1e9
    )
    assert slower.forward(config, 1, 1, 64, 64) == pytest.approx(2 * gpu.forward(config, 1, 1, 64, 64))
    assert gpu.forward(config, 2, 1, 64, 64) < gpu.forward(config, 1, 1, 64, 64)


@pytest.mark.parametrize("family, milliseconds", [("mamba", 0.87), ("mamba2", 1.46)])
def test_a_token_on_a_gpu_takes_its_kernels(family, milliseconds):
    """As long as measured on an H200 for the models of 130m with batch 1; the same on every rank of a split layer."""
    sizes = dict(hidden_size=768, num_layers=24, mamba_head_dim=64, mamba_state_dim=16 if family == "mamba" else 128)
    config = families.from_dict(options(model_type=family, **sizes).new_config(50280, 0))
    h200 = DEVICES["h200"]
    assert h200.token(config, 1, 1, 0) == pytest.approx(milliseconds / 1e3, rel=0.02)
    assert h200.token(config, 4, 1, 0) > 24 * h200.graph[family == "mamba2"]


def measured(rank, changes):
    """What the ranks of a group predict, each from its own times."""
    config, device = config_of(**changes), MeasuredDevice(1e9, dist.group.WORLD)
    found = training_divisions(config, 2, Training(64, 4), fabric(), device)
    found += generation_divisions(config, 2, Generation(64, 8), fabric(), device)
    assert all(each.seconds > 0 for each in found if not each.excluded)
    return [(each.sizes, each.parts) for each in found]


def sums_on(rank, shares):
    """(the formats, whether they are those of the fabric, small and large times) of sums over all ranks, and over more."""
    device, links, world = MeasuredDevice(1e9, dist.group.WORLD, shares=shares), fabric(), dist.get_world_size()
    mine, others = device.sums(links, world), device.sums(links, 2 * world)
    assert others.fabric is links and others.formats == WIRE_FORMATS
    times = [mine.fabric.time("all_reduce", nbytes, world, extrapolate=True) for nbytes in (1024, 2**22)]
    return mine.formats, mine.fabric is links, times, mine.wait >= 0


@pytest.fixture
def few_sums(monkeypatch):
    """Fewer sums are timed."""
    monkeypatch.setattr(measured_times, "TURNS", 3)
    monkeypatch.setattr(measured_times, "SIZES", measured_times.SIZES[::3])


@pytest.mark.skipif(not native_sums(), reason="no C library of sparsefusion")
@pytest.mark.parametrize("world", (2, pytest.param(3, marks=pytest.mark.full)))
def test_ranks_of_one_machine_sum_in_memory(ranks, world, few_sums):
    """As their models do, and exactly; ranks beyond those that measure may be on other machines."""
    first, *others = ranks(sums_on, world, True)
    formats, is_fabric, (small, large), has_wait = first
    assert formats == ("fp32",) and not is_fabric and has_wait
    # They are equal where a busy machine took as long for the smaller sum: the fitted line is then flat.
    assert 0 < small <= large
    assert all(other == first for other in others)
    assert all(found[1] for found in ranks(sums_on, world, False))


@pytest.mark.parametrize("name", by_default(("experts",), ("mamba", "zamba2", "experts")))
@pytest.mark.parametrize("world", (2, pytest.param(3, marks=pytest.mark.full)))
def test_ranks_that_measure_agree(ranks, world, name, few_sums):
    first, *others = ranks(measured, world, MODELS.get(name, EXPERTS))
    assert all(other == first for other in others)


def test_the_step_of_adamw_that_is_timed_has_moments():
    """The first step, which allocates them, is not timed; the times are measured once."""
    config, device, seen = config_of(), MeasuredDevice(1e9), []
    with register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(len(optimizer.state))):
        seconds = device.optimizer(config, 1)
    assert seen == [0, max(seen)] * (1 + REPEATED) and max(seen) > 0
    assert device.optimizer(config, 1) == seconds


def test_attention_is_timed_after_a_first_run(monkeypatch):
    calls = []
    monkeypatch.setattr(measured_times, "attend", lambda *arguments: calls.append(arguments))
    device, config = MeasuredDevice(1e9), config_of(**tiny.ZAMBA2)
    for _ in range(2):
        device._attention(config, 1, 1, 8, 16)
    assert len(calls) == 1 + REPEATED


# The command


def advised_on(rank, environment, flags):
    """(exit code, errors) of `advise` on a rank of torchrun's. environment, flags: of the last rank, and of the others."""
    is_last = rank == dist.get_world_size() - 1
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()), **environment[not is_last])
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = main(
            [*flags[not is_last], "--device", "measured", "--ranks", "2", "--seq-length", "64", "--prompt", "16"]
        )
    return code, errors.getvalue()


@pytest.mark.full
@pytest.mark.parametrize("world", (2, 3))
def test_the_rank_with_the_least_memory_decides(ranks, files, world):
    """The last rank shares its host's memory with so many that nothing fits there; the others must not wait for it."""
    environment = {"LOCAL_WORLD_SIZE": str(2**40)}, {"LOCAL_WORLD_SIZE": "1"}
    found = ranks(advised_on, world, environment, [command_of(files)] * 2)
    assert {code for code, _ in found} == {1} and "no division over 2 ranks is possible" in found[0][1]


@pytest.mark.parametrize("world", (2, pytest.param(3, marks=pytest.mark.full)))
@pytest.mark.parametrize(
    "flag", ("--fabric", *(pytest.param(f, marks=pytest.mark.full) for f in ("--model", "--memory-gb")))
)
def test_ranks_that_are_asked_different_things(ranks, files, world, flag):
    """One error on all ranks, before any of them measures."""
    (files / "other.json").write_text(json.dumps(options().new_config(64, 0)))
    fabric(2 * ALPHA).save(files / "slower.json")
    other = {"--fabric": str(files / "slower.json"), "--model": str(files / "other.json"), "--memory-gb": "1e-6"}[flag]
    found = ranks(advised_on, world, ({}, {}), ([*command_of(files), flag, other], command_of(files)))
    assert {code for code, _ in found} == {2} and f"arguments differ across ranks: rank {world - 1} got " in found[0][1]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A configuration and a fabric. No rank waits for the others' errors."""
    monkeypatch.setattr("commfabric.foundation.command_line.RANK_0_GRACE_S", 0.0)
    (tmp_path / "config.json").write_text(json.dumps(options(**tiny.ZAMBA2).new_config(64, 0)))
    fabric().save(tmp_path / "fabric.json")
    return tmp_path


def command_of(files):
    return ["advise", "--model", str(files / "config.json"), "--fabric", str(files / "fabric.json")]


def test_json(files):
    """Of the command in a process of its own."""
    flags = ["--json", "--ranks", "4", "--device", "h200", "--seq-length", "64"]
    command = [sys.executable, "-m", "megatron_ssm", *command_of(files), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 4 and found["device"] == DEVICES["h200"].name
    for job in ("training", "generation"):
        best, runner_up = found[job]["best"], found[job]["runner_up"]
        assert best["tensor"] * best["context"] * best["data"] == 4
        assert best["seconds"] <= runner_up["seconds"] and runner_up["memory"] > 0 and found[job]["reason"]
    assert 0 < found["generation"]["best"]["tpot"] < found["generation"]["best"]["ttft"]
    assert found["training"]["best"]["ttft"] is None and found["generation"]["best"]["gradients"] is None


def test_the_rates_of_a_device_from_a_file(files, capsys):
    (files / "gpu.json").write_text(
        json.dumps({"name": "GPU", "memory_gb": 96, "tflops": 1000, "bandwidth_gb_s": 4000})
    )
    assert main([*command_of(files), "--device", str(files / "gpu.json"), "--seq-length", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "GPU"
    (files / "gpu.json").write_text(json.dumps({"memory_gb": 96, "tflops": 0, "bandwidth_gb_s": 4000}))
    assert main([*command_of(files), "--device", str(files / "gpu.json")]) == 2
    assert "tflops 0 must be a number from 1e-06 to 1e+12" in capsys.readouterr().err


def test_parameters_and_quantized_matrices(files, capsys):
    """Experts that a token does not choose are not active; a quantized directory needs the memory of its file."""
    content = dict(model_type="nemotron_h", vocab_size=128, hidden_size=64, layers_block_type=["moe"])
    content |= dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
    content |= dict(moe_shared_expert_intermediate_size=64, intermediate_size=64)
    flags = ["--ranks", "1", "--device", "h100", "--seq-length", "64", "--prompt", "16", "--json"]

    def advice(**more):
        (files / "config.json").write_text(json.dumps(content | more))
        assert main([*command_of(files), *flags]) == 0
        return json.loads(capsys.readouterr().out)

    plain, quantized = advice(), advice(quantization_config=QUANTIZATION["int8"])
    assert plain["parameters"] - plain["active_parameters"] == 6 * 2 * 64 * 128 and plain["weights"] is None
    assert quantized["weights"] == "int8" and plain["parameters"] == quantized["parameters"]
    saved = plain["generation"]["best"]["memory"] - quantized["generation"]["best"]["memory"]
    config = families.from_dict(content)
    assert saved == Memory(config, 1, 2).weights - Memory(config, 1, 2, quantized_bits=8).weights > 8 * 2 * 64 * 128 / 2


def test_text_measured_on_this_machine(files, capsys):
    flags = ["--device", "measured", "--ranks", "2", "--seq-length", "64", "--prompt", "16"]
    assert main([*command_of(files), *flags]) == 0
    text = capsys.readouterr().out
    assert (
        f"{families.read(files).elements:,} parameters\n" in text
        and "training: TP" in text
        and "--tensor-model-parallel-size" in text
        and "  next: TP" in text
    )


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--ranks", "0"], "--ranks 0 must be at least 1"),
        (["--ranks", "10000000"], "--ranks 10000000 must be at least 1 and below 1048576"),
        (["--seq-length", f"{10**400}"], f"--seq-length 1{'0' * 59}... must be at least 1 and below 2^31"),
        (["--memory-gb", "-1"], "--memory-gb -1 must be from 1e-06 to 1e+12"),
        (["--memory-gb", "1e300"], "--memory-gb 1e+300 must be from 1e-06 to 1e+12"),
        (["--memory-gb", "inf"], "--memory-gb inf must be from 1e-06 to 1e+12"),
        (["--fabric", "config.json"], "is no fabric file"),
        (
            ["--fabric", "nofab.json"],
            "cannot read --fabric nofab.json: No such file or directory; torchrun --nproc-per",
        ),
        (["--model", "nowhere"], "nowhere does not exist"),
        (["--draft-head"], "draft_head=True: config.json of this zamba2 model declares no supported draft head"),
        (["--model", "l1"], "l1 holds LoRA adapters of the model base"),
        (
            ["--device", "abacus"],
            "unknown --device abacus: expected a100, h100, h200, measured, or a JSON file (No such file or directory)",
        ),
    ],
)
def test_wrong_arguments(files, flags, message, capsys):
    (files / "l1").mkdir()
    (files / "l1" / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    flags = [str(files / flag) if flag in ("config.json", "l1") else flag for flag in flags]
    command = ["advise", "--model", str(files / "config.json"), "--fabric", str(files / "fabric.json"), *flags]
    try:
        code = main(command)
    except SystemExit as leave:
        code = leave.code
    error = capsys.readouterr().err
    assert code == 2 and message in error and "Traceback" not in error


@pytest.mark.skipif(not kernels.LIBRARY, reason=f"no C library: {kernels.LIBRARY.why}")
def test_only_ranks_that_divide_nothing_read_prompts_in_c(monkeypatch):
    """As the ranks of a divided model and of a shared sequence do; their tokens are decoded in C."""
    config, device = config_of(**MODELS["mamba"]), MeasuredDevice(1e9)
    kinds, run = [], BoundCall.run
    monkeypatch.setattr(
        BoundCall, "run", lambda call, *given: (kinds.append(call.tape.builder.prompt), run(call, *given))[1]
    )
    device.forward(config, ranks=2, batch=1, tokens=8, seq=8)
    device.forward(config, ranks=1, batch=1, tokens=8, seq=16)
    assert kinds and not any(kinds)
    device.forward(config, ranks=1, batch=1, tokens=8, seq=8)
    assert any(kinds)
