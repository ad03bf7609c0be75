"""Megatron's GPTModel with gated delta nets. Oracles: transformers, and the bytes of Hugging Face directories.

The modules are Megatron's own: `GatedDeltaNet`, `SelfAttention`, `MLP`, `GPTModel` and the layer specs. The tests replace
what these take from packages that only run on GPUs: Transformer Engine's norms, linear layers with a norm in front, and core
attention; flash-linear-attention's l2norm; and CUDA's current device. The recurrence is Megatron's, of deterministic_mode.
"""

import json
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gradients import assert_near, shifted, transformers_loss, whole
from safetensors.torch import load_file, save_file
from torch import nn

import megatron_ssm
from cases import Oracle
from hf import assert_same_bytes, save_hf, tensors_in
from megatron_cpu import CPU, TorchCoreAttention, gradients_of, join
from megatron_ssm import families
from megatron_ssm.integrations.megatron_weights import (
    in_our_names,
    load_hugging_face,
    megatron_model,
    our_config,
    save_hugging_face,
)
from megatron_ssm.parallel.operators import gather_last
from megatron_ssm.parallel.ranks import Ranks

SIZES = dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_value_head_dim=12, num_hidden_layers=3) | dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"], num_attention_heads=8, num_key_value_heads=4,
    head_dim=8, vocab_size=64,
)  # fmt: skip
CASES = {
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5 tied, 61 tokens": ("qwen3_5_text", dict(tie_word_embeddings=True, vocab_size=61)),
    "qwen3-next": ("qwen3_next", {}),
}
ON_DISK = CASES | {"bfloat16": ("qwen3_5_text", dict(dtype=torch.bfloat16))}
NEAR = 1e-5
OPTIONS = CPU | dict(deterministic_mode=True, perform_initialization=False)


class CentredNorm(nn.Module):
    """Transformer Engine's RMSNorm with a zero-centred weight."""

    def __init__(self, config, hidden_size, eps):
        super().__init__()
        assert config.layernorm_zero_centered_gamma and config.normalization == "RMSNorm"
        self.weight, self.eps = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype)), eps

    def forward(self, x):
        """x / rms(x) * (1 + weight)."""
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


@pytest.fixture
def without_gpu(monkeypatch):
    """Let Megatron build and run its GPTModel with gated delta nets on a CPU."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs, gpt_layer_specs
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class NormedLinear(ColumnParallelLinear):
        """Transformer Engine's LayerNormLinear, with its name of the norm's weight."""

        def __init__(self, input_size, *arguments, config, **options):
            super().__init__(input_size, *arguments, config=config, **options)
            self.layer_norm_weight = nn.Parameter(torch.empty(input_size, dtype=config.params_dtype))

        def forward(self, x):
            eps = self.config.layernorm_epsilon
            return super().forward(F.rms_norm(x, x.shape[-1:], 1 + self.layer_norm_weight, eps))

    class Provider(LocalSpecProvider):
        """The names of Transformer Engine's provider, whose norms are parts of linear layers."""

        def fuse_layernorm_and_linear(self):
            return True

        def column_parallel_layer_norm_linear(self):
            return NormedLinear

        def layer_norm(self, rms_norm=False, for_qk=False):
            return CentredNorm

        def core_attention(self):
            return TorchCoreAttention

    for module in (experimental_attention_variant_module_specs, gpt_layer_specs):
        monkeypatch.setattr(module, "TESpecProvider", Provider, raising=False)
    monkeypatch.setattr(gated_delta_net, "HAVE_FLA", True)
    monkeypatch.setattr(gated_delta_net, "l2norm", l2norm, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def l2norm(x):
    """flash-linear-attention's, with its epsilon."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """directory(name): the Hugging Face directory of a case, whose gated delta nets have norms with (w - 1) + 1 = w."""
    made = {}

    def get(name):
        if name not in made:
            family, changes = ON_DISK[name]
            made[name] = tmp_path_factory.mktemp("model")
            save_hf(made[name], family, **SIZES | changes)
            path = made[name] / "model.safetensors"
            tensors = {n: t.clamp(0.5, 2) if "linear_attn.norm" in n else t for n, t in load_file(path).items()}
            save_file(tensors, path, metadata={"format": "pt"})
        return made[name]

    return get


def filled(directory, tp, **options):
    """Megatron's model with the weights of a directory."""
    model = megatron_model(families.read(directory), 128, tp, **OPTIONS | options)
    load_hugging_face(model, directory)
    return model


@pytest.mark.parametrize("tp, dp", [(1, 1), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("name", ON_DISK)
def test_from_hugging_face_and_back(ranks, name, tp, dp, directory, tmp_path, without_gpu):
    """With and without a source: Megatron's model has every size that the weights depend on."""

    def run(rank):
        join(tp)
        model = filled(directory(name), tp, params_dtype=ON_DISK[name][1].get("dtype", torch.float32))
        save_hugging_face(model, tmp_path / "again")
        model.decoder.source = None
        save_hugging_face(model, tmp_path / "alone")

    directory(name)
    ranks(run, tp * dp)
    assert_same_bytes(tensors_in(tmp_path / "again"), tensors_in(directory(name)))
    configs = [json.loads((path / "config.json").read_text()) for path in (directory(name), tmp_path / "again")]
    assert configs[0] == configs[1]
    with megatron_ssm.load(directory(name)) as expected, megatron_ssm.load(tmp_path / "alone") as alone:
        assert alone.config.family == "qwen3_5_text"
        for (name, theirs), ours in zip(expected.named_parameters(), alone.parameters(), strict=True):
            assert theirs.equal(ours), name


def in_our_shapes(named, model, vocab):
    """Megatron's parameters or gradients under our names, in our shapes, without the rows that pad the vocabulary."""
    found = in_our_names(named.items(), our_config(model))
    found = {name: part.flatten(0, 1) if ".qkv." in name else part for name, part in found.items()}
    for name in {"embeddings.weight", "lm_head.weight"} & found.keys():
        rows = len(found[name])
        found[name] = found[name][: min(rows, vocab - dist.get_rank() * rows)]
    return found


# The names and shapes of Megatron's parameters on each rank of 2
NAMES = {
    "embedding.word_embeddings.weight": (32, 32),
    "decoder.layers.0.self_attention.dt_bias": (4,),
    "decoder.layers.0.self_attention.A_log": (4,),
    "decoder.layers.0.self_attention.in_proj.layer_norm_weight": (32,),
    "decoder.layers.0.self_attention.in_proj.weight": (16 + 16 + 48 + 48 + 4 + 4, 32),
    "decoder.layers.0.self_attention.conv1d.weight": (16 + 16 + 48, 1, 4),
    "decoder.layers.0.self_attention.out_norm.weight": (12,),
    "decoder.layers.0.self_attention.out_proj.weight": (32, 48),
    "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": (32,),
    "decoder.layers.0.mlp.linear_fc1.weight": (24 + 24, 32),
    "decoder.layers.0.mlp.linear_fc2.weight": (32, 24),
    "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": (32,),
    "decoder.layers.1.self_attention.linear_qkv.weight": (2 * (16 + 16 + 8 + 8), 32),
    "decoder.layers.1.self_attention.q_layernorm.weight": (8,),
    "decoder.layers.1.self_attention.k_layernorm.weight": (8,),
    "decoder.layers.1.self_attention.linear_proj.weight": (32, 32),
    "decoder.final_layernorm.weight": (32,),
    "output_layer.weight": (32, 32),
}


@pytest.mark.parametrize("tp", (1, 2, pytest.param(4, marks=pytest.mark.full)))
def test_names_and_shapes(ranks, tp, directory, without_gpu):
    """Megatron's are as written here, and under our names they are those of our model on the same rank."""

    def run(rank):
        join(tp)
        model = megatron_model(families.read(directory("qwen3.5")), 128, tp, **OPTIONS)
        theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
        ours = in_our_shapes(dict(model.named_parameters()), model, 64)
        return theirs, {name: tuple(tensor.shape) for name, tensor in ours.items()}

    config = families.read(directory("qwen3.5"))
    for rank, (theirs, ours) in enumerate(ranks(run, tp)):
        if tp == 2:
            assert theirs.items() >= NAMES.items()
        assert ours == {field.name: field.local_shape(rank, tp) for field in config.fields()}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """oracle(name): the transformers model of a case."""
    made = {}

    def get(name):
        if name not in made:
            family, changes = CASES[name]
            made[name] = Oracle(tmp_path_factory.mktemp("oracle"), family, SIZES | changes)
        return made[name]

    return get


def summed_over_ranks(model):
    """Sum what Megatron leaves partial: gradients of norms over a head, of which each rank has some."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_layernorm.weight", "k_layernorm.weight", "out_norm.weight")):
            dist.all_reduce(parameter.grad)


@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients_are_those_of_transformers(ranks, name, tp, oracle, without_gpu):
    """In float32, because Megatron's recurrence is. The logits are also those of our model on the same ranks."""
    oracle = oracle(name)
    inputs, labels = shifted(oracle.ids)

    def run(rank):
        join(tp)
        with torch.compiler.set_stance("force_eager"):
            model = filled(oracle.directory, tp)
            group = Ranks.of(model.pg_collection.tp, share=None)
            logits = gather_last(model(inputs, None, None), group).detach()[..., : oracle.vocab]
            loss, found = gradients_of(model, inputs, labels)
        summed_over_ranks(model)
        with megatron_ssm.load(oracle.directory, group=model.pg_collection.tp) as ours, torch.no_grad():
            expected = ours(inputs)
        return logits, expected, loss, in_our_shapes(found, model, oracle.vocab)

    results, (loss, gradients) = ranks(run, tp), transformers_loss(oracle)
    for logits, ours, found_loss, _ in results:
        for expected in (oracle.logits(inputs), ours):
            torch.testing.assert_close(logits, expected, rtol=0, atol=NEAR * expected.abs().max().item())
        torch.testing.assert_close(found_loss.double(), loss, rtol=NEAR, atol=0)
    assert_near(whole(oracle, [found for *_, found in results]), gradients, 3 * NEAR)


# What is refused

REFUSED = {
    "layernorm_zero_centered_gamma=False: a qwen3_5_text model has .*=True": dict(layernorm_zero_centered_gamma=False),
    "add_bias_linear=True: a qwen3_5_text model has add_bias_linear=False": dict(add_bias_linear=True),
    "has rope_theta=100.0 in layers.1.attention, but Megatron's model has 50.0": dict(rotary_base=50.0),
    "position_embedding_type='none': a qwen3_5_text model has .*='rope'": dict(position_embedding_type="none"),
}


@pytest.mark.parametrize("tp", (1, 2))
def test_what_is_refused(ranks, tp, directory, tmp_path, without_gpu):
    """Options that these models do not have, models of other sizes, and key/value heads that no rank has in whole."""
    save_hf(tmp_path / "mamba2", "mamba2", vocab_size=64)
    save_hf(tmp_path / "1 head", "qwen3_5_text", **SIZES | dict(num_key_value_heads=1))

    def run(rank):
        join(tp)
        model = megatron_model(families.read(directory("qwen3.5")), 128, tp, **OPTIONS)
        with pytest.raises(ValueError, match="has family='mamba2', but Megatron's model has 'qwen3_5_text'"):
            load_hugging_face(model, tmp_path / "mamba2")
        for message, changed in REFUSED.items():
            for name, value in changed.items():
                owner = model if hasattr(model, name) else model.config
                before = getattr(owner, name)
                setattr(owner, name, value)
                with pytest.raises(ValueError, match=message):
                    load_hugging_face(model, directory("qwen3.5"))
                setattr(owner, name, before)
        if tp > 1:
            with pytest.raises(
                ValueError, match="1 key/value heads of Megatron's attention do not divide over 2 ranks"
            ):
                filled(tmp_path / "1 head", tp)

    directory("qwen3.5")
    ranks(run, tp)


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_what_is_missing(ranks, directory):
    def run(rank):
        join()
        with pytest.raises(ModuleNotFoundError, match="layer specs of gated delta nets need transformer_engine"):
            megatron_model(families.read(directory("qwen3.5")), 128, **OPTIONS)

    directory("qwen3.5")
    ranks(run, 1)
