"""Initial parameters. Oracles: the same seed on one rank, and the distributions that the docstrings name."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases import assemble
from megatron_ssm import build, families, initialize

SHAPE = dict(hidden_size=64, num_hidden_layers=3, vocab_size=211, state_size=16, use_bias=True)
ZAMBA = dict(
    hidden_size=64, num_hidden_layers=3, vocab_size=211, mamba_d_state=16, layers_block_type=["hybrid"] * 3,
    num_attention_heads=8, num_key_value_heads=8, intermediate_size=96,
)  # fmt: skip
ZAMBA2 = dict(ZAMBA, model_type="zamba2", n_mamba_heads=16, adapter_rank=20, use_shared_attention_adapter=True)
MODELS = {
    "mamba": dict(SHAPE, model_type="mamba"),
    "mamba2-1-group": dict(SHAPE, model_type="mamba2", num_heads=16, head_dim=8, n_groups=1, tie_word_embeddings=True),
    "mamba2-2-groups": dict(SHAPE, model_type="mamba2", num_heads=16, head_dim=8, n_groups=2),
    "mamba2-4-groups": dict(SHAPE, model_type="mamba2", num_heads=16, head_dim=8, n_groups=4),
    "falcon": dict(SHAPE, model_type="falcon_mamba"),
    "zamba-2-heads": dict(ZAMBA, model_type="zamba", mamba_proj_bias=True),
    "zamba2-2-groups": dict(ZAMBA2, mamba_ngroups=2, tie_word_embeddings=False),
    "zamba2-2-blocks": dict(ZAMBA2, num_mem_blocks=2, add_bias_linear=True),
}
MAMBAS = [name for name in MODELS if "zamba" not in name]  # their tensors have the names used below
ZAMBAS = [name for name in MODELS if "zamba" in name]


def initialized(name, seed=0, group=None):
    """{our name: this rank's part} of a model that is filled with NaN and then initialized."""
    model = build(families.from_dict(MODELS[name]), group)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    assert initialize(model, seed) is model
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def whole(name, shards):
    """{Hugging Face name: whole tensor}"""
    return assemble(families.from_dict(MODELS[name]).fields(), shards)


@pytest.mark.parametrize("tp", (2, 4))
@pytest.mark.parametrize("name", MODELS)
def test_the_number_of_ranks_changes_no_bit(ranks, tp, name):
    together = whole(name, ranks(lambda rank: initialized(name, 3, dist.group.WORLD), tp))
    alone = whole(name, [initialized(name, 3)])
    assert all(torch.equal(together[tensor], alone[tensor]) for tensor in alone)


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides(name):
    """The same seed gives the same values, whatever torch's generator does; another seed changes all random values."""
    first = initialized(name, 1)
    torch.rand(3)
    again, other = initialized(name, 1), initialized(name, 2)
    fixed = (".D", "norm.weight", "norm_weight", "norm_f.weight", ".bias")
    fixed += (".A_log",) if name in ("mamba", "falcon", "zamba-2-heads") else ()
    for parameter, values in first.items():
        assert torch.equal(values, again[parameter])
        assert torch.equal(values, other[parameter]) == any(part in parameter for part in fixed), parameter


@pytest.mark.parametrize("seed", (0, 1234, 2**31 - 1, 2**32 - 1))
def test_any_seed(seed):
    assert initialized("mamba", seed)["embeddings.weight"].isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_no_two_layers_or_fields_are_alike(name):
    first_16 = [
        t.flatten()[:16] for n, t in initialized(name).items() if n.endswith(("z", "x", "B", "C", "dt", ".weight"))
    ]
    random = [values for values in first_16 if values.unique().numel() > 2]
    assert len(random) > 8
    assert all(not torch.equal(a, b) for i, a in enumerate(random) for b in random[:i] if a.shape == b.shape)


def assert_uniform(values, bound):
    """Assert that values lie within the bound and have the standard deviation bound / sqrt(3)."""
    assert values.abs().max() <= bound
    assert values.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert abs(values.mean()) <= 0.1 * bound


@pytest.mark.parametrize("name", MAMBAS)
def test_the_distributions(name):
    tensors = whole(name, [initialized(name)])
    layers, inner, width = SHAPE["num_hidden_layers"], 128, 64
    kind_1 = name in ("mamba", "falcon")
    assert tensors["backbone.embeddings.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert tensors["backbone.norm_f.weight"].eq(1).all()
    for layer in range(layers):
        one = {k.split(f"layers.{layer}.")[1]: t for k, t in tensors.items() if f"layers.{layer}." in k}
        assert_uniform(one["mixer.in_proj.weight"], width**-0.5)
        assert_uniform(one["mixer.conv1d.weight"], 4**-0.5)
        assert_uniform(one["mixer.out_proj.weight"], inner**-0.5 / math.sqrt(layers))
        assert all(one[constant].eq(1).all() for constant in ("norm.weight", "mixer.D"))
        assert all(one[constant].eq(0).all() for constant in ("mixer.in_proj.bias", "mixer.out_proj.bias"))
        dt = F.softplus(one["mixer.dt_proj.bias" if kind_1 else "mixer.dt_bias"])
        assert dt.min() >= 0.001 * (1 - 1e-4) and dt.max() <= 0.1 * (1 + 1e-4)
        assert dt.log().std() == pytest.approx(math.log(100) / math.sqrt(12), rel=0.35)  # log-uniform
        A = one["mixer.A_log"].exp()
        if kind_1:
            torch.testing.assert_close(A, torch.arange(1.0, 17, dtype=A.dtype).expand(inner, 16))
            assert_uniform(one["mixer.x_proj.weight"], inner**-0.5)
            assert_uniform(one["mixer.dt_proj.weight"], 4**-0.5)  # dt_rank is 64/16
        else:
            assert 1 <= A.min() and A.max() <= 16


def test_a_new_granite_has_step_sizes_as_in_the_papers():
    """With transformers' dt_bias of 1, a step is 1.3, and states forget within a few tokens."""
    config = Path(__file__).resolve().parents[3] / "examples" / "demo.json"
    model = initialize(build(families.from_dict(json.loads(config.read_text()))))
    steps = torch.cat([F.softplus(values) for name, values in model.named_parameters() if name.endswith("dt_bias")])
    assert len(steps) == 2 * 8 and steps.min() >= 0.001 * (1 - 1e-4) and steps.max() <= 0.1 * (1 + 1e-4)


@pytest.mark.parametrize("name", ZAMBAS)
def test_the_distributions_of_a_shared_block(name):
    """The bound of a field depends on its number of inputs, not on the layout in which Hugging Face stores it."""
    fields, residual = initialized(name), math.sqrt(3)
    assert_uniform(fields["shared.0.qkv.weight.q"], 128**-0.5)
    assert_uniform(fields["shared.0.gate_up.weight.up"], 64**-0.5)
    assert_uniform(fields["shared.0.o_proj.weight"], 128**-0.5 / residual)
    assert_uniform(fields["shared.0.down_proj.weight"], 96**-0.5 / residual)
    assert all(fields[f"shared.0.{norm}.weight"].eq(1).all() for norm in ("norm", "mlp_norm"))
    for layer in range(3):
        assert_uniform(fields[f"layers.{layer}.use.linear"], 64**-0.5 / residual)
        if name == "zamba-2-heads":
            assert_uniform(fields[f"layers.{layer}.mixer.x_proj"], 128**-0.5)
        else:
            assert_uniform(fields[f"layers.{layer}.use.qkv.down.k"], 128**-0.5)
            assert_uniform(fields[f"layers.{layer}.use.qkv.up.k"], 20**-0.5)
            assert_uniform(fields[f"layers.{layer}.use.gate_up.up.gate"], 20**-0.5)
    biases = [values for parameter, values in fields.items() if ".bias" in parameter]
    assert biases and all(values.eq(0).all() for values in biases)


@pytest.mark.parametrize("name", MODELS)
def test_a_new_model_predicts_uniformly(name):
    """Its loss is log(vocabulary), that of a uniform guess."""
    model = initialize(build(families.from_dict(MODELS[name])))
    ids = torch.randint(211, (4, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = model.loss(ids[:, :-1], ids[:, 1:])
    assert loss.item() == pytest.approx(math.log(211), rel=0.05)
