"""Megatron's MambaModel with our layers. Oracles: transformers in float64, and plain torch operations."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from chosen import full
from gradients import assert_near, shifted, transformers_loss, whole

from attention2d import CoreAttention
from cases import Oracle
from hf import assert_same_bytes, edit_config, save_hf, tensors_in
from megatron_cpu import CPU, TorchCoreAttention, gradients_of, hybrid_model, join
from megatron_ssm import families
from megatron_ssm.integrations import megatron_weights
from megatron_ssm.integrations.megatron_fields import config_of_layers, spec_options
from megatron_ssm.integrations.megatron_weights import load_hugging_face, megatron_model
from megatron_ssm.integrations.specs import gpt_layer_spec, mamba_stack_spec, stack_spec, with_core_attention

EXACT = 5e-11
CASES = {
    "mamba2-1-group": ("mamba2", dict(n_groups=1, time_step_limit=(0.02, 0.2))),
    "mamba2-2-groups": (
        "mamba2",
        dict(n_groups=2, use_bias=True, tie_word_embeddings=True, conv_kernel=3, vocab_size=61),
    ),
    "mamba": ("mamba", dict(use_bias=True, tie_word_embeddings=False, time_step_rank=5, vocab_size=61)),
    "falcon": ("falcon_mamba", dict(mixer_rms_eps=0.01, intermediate_size=96, use_conv_bias=False)),
    "zamba": ("zamba", dict(mamba_proj_bias=True, num_hidden_layers=3, hidden_act="silu")),
    "zamba2": (
        "zamba2",
        dict(mamba_ngroups=2, use_shared_attention_adapter=True, use_mem_rope=True, add_bias_linear=True)
        | dict(layers_block_type=["linear_attention"] + ["hybrid"] * 3, tie_word_embeddings=True),
    ),
    "nemotron": ("nemotron_h", dict(num_hidden_layers=3, head_dim=8, num_key_value_heads=4, num_attention_heads=8)),
    "zamba2-untied": (
        "zamba2",
        dict(num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False)
        | dict(layers_block_type=["hybrid"] * 3),
    ),
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """oracle(name): the transformers model of a case, with 64 tokens per sequence and one more label."""
    made = {}

    def get(name):
        if name not in made:
            family, changes = CASES[name]
            directory = tmp_path_factory.mktemp(name)
            made[name] = Oracle(directory, family, dict(vocab_size=64) | changes, torch.float64)
            made[name].ids = made[name].ids[:, :65]
        return made[name]

    return get


def run_model(oracle, tp, cp, **options):
    """(loss, gradients under our names) of Megatron's model, filled from the oracle's directory."""
    join(tp, cp)
    config = families.read(oracle.directory)
    options = CPU | dict(params_dtype=torch.float64, context_parallel_size=cp) | options
    model = megatron_model(config, 64, tp, **options)
    load_hugging_face(model, oracle.directory)
    loss, found = gradients_of(model, *shifted(oracle.ids))
    found = megatron_weights.in_our_names(found.items(), config)
    found = {name: t.flatten(0, 1) if ".mixer.qkv." in name else t for name, t in found.items()}
    for name in {"embeddings.weight", "lm_head.weight"} & found.keys():  # with rows that pad the vocabulary
        per_rank = -(-config.vocab_size // tp)
        rows = min(per_rank, config.vocab_size - dist.get_rank() % tp * per_rank)
        assert not found[name][rows:].any()
        found[name] = found[name][:rows]
    return loss, found


def check(oracle, results, tp):
    """Assert that the loss and every gradient are those of transformers."""
    loss, theirs = transformers_loss(oracle)
    for ours, _ in results:
        torch.testing.assert_close(ours, loss, rtol=EXACT, atol=0)
    assert_near(whole(oracle, [shard for _, shard in results[:tp]]), theirs, EXACT)


@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_transformers(ranks, name, tp, oracle):
    """Also with more ranks than groups, which Megatron's own mixer refuses."""
    oracle = oracle(name)
    check(oracle, ranks(lambda rank: run_model(oracle, tp, 1), tp), tp)


@pytest.mark.parametrize("name, tp, cp, kind", [
    ("mamba2-1-group", 2, 2, None), ("mamba", 1, 4, None), ("zamba", 1, 2, "all_gather"), full("zamba2", 1, 4, "2d"),
    ("zamba2", 2, 2, "p2p"),
])  # fmt: skip
def test_loss_and_gradients_over_context_ranks(ranks, name, tp, cp, kind, oracle):
    """Megatron itself shards the tokens."""
    oracle = oracle(name)
    check(oracle, ranks(lambda rank: run_model(oracle, tp, cp, cp_comm_type=kind), tp * cp), tp)


@pytest.mark.parametrize(
    "option", (dict(gated_linear_unit=True), dict(softmax_scale=1.0), dict(add_bias_linear=True)), ids=str
)
def test_options_that_nemotron_h_does_not_have(ranks, option, oracle):
    """They are refused when the model is built, because its files could not say them."""
    config = families.read(oracle("nemotron").directory)

    def run(rank):
        join(1)
        with pytest.raises(ValueError, match=f"{next(iter(option))}=.*: a nemotron_h model has no such option"):
            megatron_model(config, 64, **CPU | option)

    ranks(run, 1)


# A hybrid pattern of Megatron's own: Mamba, attention and MLP layers

SEQ, VOCAB, HEADS, GROUPS, PATTERN = 32, 64, 4, 2, "M*M-"


def config_of(layers, tp, cp):
    """A small configuration in float64, after the process groups and the seed of all numbers of ranks have been set."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    join(tp, cp)
    torch.manual_seed(0)
    return TransformerConfig(
        num_layers=layers, hidden_size=32, num_attention_heads=HEADS, num_query_groups=GROUPS, normalization="RMSNorm",
        mamba_state_dim=8, mamba_head_dim=8, mamba_num_groups=2, tensor_model_parallel_size=tp, init_method_std=0.2,
        context_parallel_size=cp, cp_comm_type="2d", params_dtype=torch.float64, **CPU,
    )  # fmt: skip


def hybrid(tp=1, cp=1, **grid):
    """A MambaModel of PATTERN with the parameters that Megatron and we initialize, the same for all numbers of ranks.

    grid: of its attention.
    """
    spec = copy.deepcopy(mamba_stack_spec)
    spec.submodules.attention_layer = with_core_attention(spec.submodules.attention_layer, **grid)
    return hybrid_model(config_of(4, tp, cp), spec, VOCAB, SEQ, PATTERN)


def tokens():
    ids = torch.randint(VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def plain_forward(model, ids):
    """The logits (batch, seq, vocab) of a model on one rank, by plain operations and our mixers."""
    x = F.embedding(ids, model.embedding.word_embeddings.weight)
    for symbol, layer in zip(PATTERN, model.decoder.layers, strict=True):
        norm = {"M": "norm", "*": "input_layernorm", "-": "pre_mlp_layernorm"}[symbol]
        y = F.rms_norm(x, x.shape[-1:], getattr(layer, norm).weight, 1e-5)
        if symbol == "M":
            x = x + layer.mixer(y.transpose(0, 1))[0].transpose(0, 1)
        elif symbol == "*":
            x = x + plain_attention(layer.self_attention, y)
        else:
            fc1, fc2 = layer.mlp.linear_fc1, layer.mlp.linear_fc2
            x = x + F.linear(F.gelu(F.linear(y, fc1.weight, fc1.bias)), fc2.weight, fc2.bias)
    x = F.rms_norm(x, x.shape[-1:], model.decoder.final_norm.weight, 1e-5)
    return F.linear(x, model.output_layer.weight)


def plain_attention(attention, y):
    """Megatron packs the rows of a group's queries, its key and its value."""
    qkv, proj = attention.linear_qkv, attention.linear_proj
    groups = F.linear(y, qkv.weight, qkv.bias).unflatten(-1, (GROUPS, HEADS // GROUPS + 2, -1))
    q, k, v = groups.split([HEADS // GROUPS, 1, 1], dim=3)
    q, k, v = (t.flatten(2, 3).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(out.transpose(1, 2).flatten(2), proj.weight, proj.bias)


@pytest.fixture(scope="module")
def plain(ranks):
    """(loss, gradients) of the hybrid pattern by plain operations on one rank."""

    def run(rank):
        model, (inputs, labels) = hybrid(), tokens()
        loss = F.cross_entropy(plain_forward(model, inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}

    return ranks(run, 1)[0]


def gpt(tp=1, cp=1, is_plain=False, **grid):
    """A GPTModel of gpt_layer_spec; is_plain: with torch's attention instead of ours. Megatron makes its norms in fp32."""
    from megatron.core.models.gpt import GPTModel

    spec = with_core_attention(gpt_layer_spec, **grid)
    if is_plain:
        spec.submodules.self_attention.submodules.core_attention = TorchCoreAttention
    return GPTModel(config_of(2, tp, cp), spec, VOCAB, SEQ, position_embedding_type="none").double()


@pytest.fixture(scope="module")
def plain_gpt(ranks):
    """(loss, gradients) of the GPTModel with torch's attention on one rank."""
    return ranks(lambda rank: gradients_of(gpt(is_plain=True), *tokens()), 1)[0]


def is_split(parameter):
    """Whether Megatron has split a parameter; those of its norms have no mark."""
    return getattr(parameter, "tensor_model_parallel", False)


@pytest.mark.parametrize("tp, cp, grid", [(1, 1, {}), (2, 1, {}), (1, 4, {}), (2, 2, {}), (1, 4, dict(rows=2, cols=2))])
@pytest.mark.parametrize("make", (hybrid, gpt))
def test_megatrons_own_layers_beside_ours(ranks, make, tp, cp, grid, plain, plain_gpt):
    """A hybrid pattern with attention and MLP layers, and a GPTModel with the 2-D core attention."""

    def run(rank):
        model = make(tp, cp, **grid)
        schedules = [each.schedule for each in model.modules() if isinstance(each, CoreAttention)]
        assert schedules and all(getattr(each.grid, name) == grid[name] for each in schedules for name in grid)
        loss, found = gradients_of(model, *tokens())
        return loss, found, {name: p.partition_dim for name, p in model.named_parameters() if is_split(p)}

    results, (loss, expected) = ranks(run, tp * cp), plain if make is hybrid else plain_gpt
    for ours, found, _ in results:
        torch.testing.assert_close(ours, loss, rtol=EXACT, atol=0)
        assert found.keys() == expected.keys()
    _, first, split = results[0]
    assembled = {
        name: torch.cat([found[name] for _, found, _ in results[:tp]], split[name]) if name in split else grad
        for name, grad in first.items()
    }
    assert_near(assembled, expected, EXACT)


@pytest.mark.parametrize("tp", (1, 2))
def test_training_lowers_megatrons_own_loss(ranks, tp):
    def run(rank):
        model, (inputs, labels) = hybrid(tp), tokens()
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for _ in range(8):
            optimizer.zero_grad()
            loss = model(inputs, None, None, labels=labels).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    for losses in ranks(run, tp):
        assert losses[-1] < losses[0] - 1, losses


def curve(model):
    """The losses of 8 optimizer steps; AdamW needs no communication."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(gradients_of(model, *tokens())[0])
        optimizer.step()
    return torch.stack(losses)


@pytest.mark.parametrize("tp, cp", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("make", (hybrid, gpt))
def test_training_has_the_losses_of_one_rank(ranks, make, tp, cp):
    """For a GPTModel, those with torch's attention."""
    (expected,) = ranks(lambda rank: curve(make() if make is hybrid else gpt(is_plain=True)), 1)
    assert expected[-1] < expected[0] - 1
    for losses in ranks(lambda rank: curve(make(tp, cp)), tp * cp):
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    "tp, name", [pytest.param(2, "mamba2-1-group", marks=pytest.mark.full), (4, "mamba2-2-groups"), (2, "zamba2")]
)
def test_sequence_parallel_stacks(ranks, tp, name, oracle):
    """Each rank has a share of the tokens between the layers. Megatron's embedding and output layer need CUDA for that.

    As in Megatron's training, gradients of parameters with the mark sequence_parallel are summed over the ranks.
    """
    oracle = oracle(name)
    generator = torch.Generator().manual_seed(2)
    x, weights = torch.randn(2, 64, 2, 32, generator=generator, dtype=torch.float64)

    def run(rank, **options):
        join(tp)
        config = families.read(oracle.directory)
        model = megatron_model(config, 64, tp, **CPU, params_dtype=torch.float64, **options)
        load_hugging_face(model, oracle.directory)
        mine = slice(rank * 64 // tp, (rank + 1) * 64 // tp) if options else slice(None)
        (model.decoder(x[mine], None) * weights[mine]).sum().backward()
        for parameter in model.parameters():
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad)
        return {n: p.grad for n, p in model.decoder.named_parameters() if p.requires_grad}

    for rank in ranks(lambda rank: (run(rank), run(rank, sequence_parallel=True)), tp):
        assert_near(rank[1], rank[0], EXACT)


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
def test_the_example_in_the_guide(ranks, tp, capfd):
    page = (Path(__file__).parents[3] / "docs/guides/megatron.md").read_text()
    section = page.split("## Our layers in MambaModel")[1]
    program = re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[1]
    ranks(lambda rank: exec(program.replace("=2", f"={tp}"), {}), tp)
    assert 5 < float(capfd.readouterr().out) < 6


@pytest.mark.parametrize("tp", (pytest.param(1, marks=pytest.mark.full), 2))
def test_the_example_of_weights_in_the_guide(ranks, tp, tmp_path, monkeypatch):
    """As it is printed, on one rank and on two, with the vocabulary of the demo's model."""
    page = (Path(__file__).parents[3] / "docs/guides/megatron.md").read_text()
    program = re.search(r"^```py\n(.*?)^```", page.split("### Checkpoints")[1], re.MULTILINE | re.DOTALL)[1]
    save_hf(tmp_path / "DIR", "mamba2", vocab_size=257, num_hidden_layers=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", str(tp))
    ranks(lambda rank: exec(program, {}), tp)
    assert_same_bytes(tensors_in(tmp_path / "OTHER"), tensors_in(tmp_path / "DIR"))


# What is refused


@pytest.mark.parametrize(
    "family, name, line",
    [
        ("zamba2", "num_mem_block", "is not a field of zamba2's config.json (did you mean num_mem_blocks?)"),
        ("zamba2", "adaptor_rank", "is not a field of zamba2's config.json (did you mean adapter_rank?)"),
        ("mamba2", "num_mem_blocks", "is not a field of mamba2's config.json"),
        ("mambo2", "expand", "unknown family 'mambo2' (did you mean mamba2?)"),
    ],
)
def test_misspelled_arguments_of_a_spec(family, name, line):
    """Also where the parameters of a ModuleSpec are written by hand."""
    for build in (stack_spec, lambda family, **given: config_of_layers(None, family, given)):
        with pytest.raises(ValueError, match=re.escape(line) + r"( \(did you mean .*\))?$"):
            build(family, **{name: 8})


def test_unknown_fields_of_a_file_are_ignored(tmp_path):
    """`Stack.unknown` names them."""
    save_hf(tmp_path, "mamba2", num_hidden_layers=1)
    edit_config(tmp_path, num_mem_blocks=3, conv_kernel=4)
    config = families.read(tmp_path)
    options = spec_options(config)
    assert config.unknown == ("num_mem_blocks",)
    assert "conv_kernel" in options and "num_mem_blocks" not in options and stack_spec("mamba2", **options)
