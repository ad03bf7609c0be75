"""Weights of Megatron's models. Oracles: the bytes of Hugging Face directories, and the state dicts of Megatron's mixer."""

import json
import math
import sys
from types import ModuleType

import pytest
import torch
from chosen import by_default
from torch import nn

import megatron_ssm
from hf import assert_same_bytes, save_hf, tensors_in
from megatron_cpu import CPU, hybrid_model, join, save_without_cuda
from megatron_ssm import families
from megatron_ssm.integrations import specs
from megatron_ssm.integrations.megatron_layers import FUSED_NORMS, HybridLayer, Mixer, Stack
from megatron_ssm.integrations.megatron_weights import load_hugging_face, megatron_model, save_hugging_face

CASES = {
    "mamba": ("mamba", dict(use_bias=True)),
    "mamba2": ("mamba2", dict(n_groups=2, bos_token_id=3, eos_token_id=[0, 4], pad_token_id=5)),
    "zamba": ("zamba", {}),
    "zamba2": ("zamba2", dict(mamba_ngroups=2, use_shared_attention_adapter=True)),
    "nemotron": ("nemotron_h", dict(num_hidden_layers=4, head_dim=8, num_key_value_heads=4, num_attention_heads=8)),
    "61 tokens": ("mamba2", dict(vocab_size=61)),  # not a multiple of 2 or 4: Megatron's model has more rows
    "61 tied tokens": ("mamba2", dict(vocab_size=61, tie_word_embeddings=True)),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """directory(name): the Hugging Face directory of a case, with a file of a tokenizer."""
    made = {}

    def get(name):
        if name not in made:
            family, changes = CASES[name]
            made[name] = tmp_path_factory.mktemp(name)
            save_hf(made[name], family, **{"vocab_size": 64, **changes})
            (made[name] / "tokenizer.json").write_text("{}")
        return made[name]

    return get


def new_model(directory, tp):
    """Megatron's model of a directory's configuration, with other weights."""
    options = {name: value for name, value in CPU.items() if name != "use_cpu_initialization"}  # found by itself
    return megatron_model(families.read(directory), 64, tp, **options)


@pytest.mark.parametrize("tp, dp", [(1, 1), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("name", CASES)
def test_from_hugging_face_and_back(ranks, name, tp, dp, directory, tmp_path):
    def run(rank):
        join(tp)
        model = new_model(directory(name), tp)
        load_hugging_face(model, directory(name))
        save_hugging_face(model, tmp_path / "again")

    directory(name)
    ranks(run, tp * dp)
    assert_same_bytes(tensors_in(tmp_path / "again"), tensors_in(directory(name)))
    assert other_files(tmp_path / "again") == other_files(directory(name))


def other_files(directory):
    """(config.json, tokenizer.json) of a directory; None for one that is missing."""
    paths = (directory / "config.json", directory / "tokenizer.json")
    return tuple(json.loads(path.read_text()) if path.exists() else None for path in paths)


@pytest.mark.parametrize("tp", (1, 2))
def test_fields_of_another_directory(ranks, tp, directory, tmp_path):
    """`source` has what Megatron's model lacks, as after `dist_checkpointing.load`; without it, that is missing."""

    def run(rank):
        join(tp)
        model = new_model(source, tp)
        save_hugging_face(model, tmp_path / "with", source)
        save_hugging_face(model, tmp_path / "without")
        with pytest.raises(ValueError, match="has family='mamba', but Megatron's model has 'mamba2'"):
            save_hugging_face(model, tmp_path / "refused", other)
        with pytest.raises(FileNotFoundError, match="config.json does not exist"):
            save_hugging_face(model, tmp_path / "refused", tmp_path)

    source, other = directory("mamba2"), directory("mamba")
    ranks(run, tp)
    assert other_files(tmp_path / "with") == other_files(source)
    config, tokenizer = other_files(tmp_path / "without")
    assert "eos_token_id" not in config and not config["residual_in_fp32"] and tokenizer is None
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("name", by_default(("mamba2", "zamba2", "nemotron", "61 tied tokens"), CASES))
@pytest.mark.parametrize("tp", (1, 4))
def test_distributed_checkpoints_are_divided_anew(ranks, name, tp, directory, tmp_path, monkeypatch):
    """Saved by two ranks, loaded by one and by four; among these are more ranks than groups."""
    from megatron.core import dist_checkpointing

    save_without_cuda(monkeypatch)

    def save(rank):
        join(2)
        model = new_model(directory(name), 2)
        load_hugging_face(model, directory(name))
        dist_checkpointing.save(model.sharded_state_dict(), str(tmp_path))

    def load(rank):
        join(tp)
        ours, theirs = (new_model(directory(name), tp) for _ in range(2))
        load_hugging_face(theirs, directory(name))
        ours.load_state_dict(dist_checkpointing.load(ours.sharded_state_dict(), str(tmp_path)))
        return all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))

    directory(name)
    ranks(save, 2)
    assert ranks(load, tp) == [True] * tp


def pattern_model(seed, tp):
    """A MambaModel with attention and MLP layers; its weights depend on the seed, not on the number of ranks."""
    torch.manual_seed(seed)
    sizes = dict(num_query_groups=4, tensor_model_parallel_size=tp)
    return with_other_norms(mamba_model(pattern="M*M-", num_layers=4, **sizes), seed)


def gpt_model(seed, tp):
    """The same for a GPTModel."""
    from megatron.core.models.gpt import GPTModel

    torch.manual_seed(seed)
    config = transformer_config(num_query_groups=4, tensor_model_parallel_size=tp)
    return with_other_norms(GPTModel(config, specs.gpt_layer_spec, 64, 64, position_embedding_type="none"), seed)


@torch.no_grad()
def with_other_norms(model, seed):
    """A model with weights of norms, which are 1 otherwise."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter += seed
    return model


@pytest.mark.parametrize("make", (pattern_model, gpt_model))
@pytest.mark.parametrize("tp", (1, 4))
def test_distributed_checkpoints_with_attention_are_divided_anew(ranks, make, tp, tmp_path, monkeypatch):
    """Those of transformer and MLP layers of Megatron's own, saved by two ranks."""
    from megatron.core import dist_checkpointing

    save_without_cuda(monkeypatch)

    def save(rank):
        join(2)
        dist_checkpointing.save(make(1, 2).sharded_state_dict(), str(tmp_path))

    def load(rank):
        join(tp)
        ours, theirs = make(2, tp), make(1, tp)
        before = [p.clone() for p in ours.parameters()]
        ours.load_state_dict(dist_checkpointing.load(ours.sharded_state_dict(), str(tmp_path)))
        changed = sum(not torch.equal(p, old) for p, old in zip(ours.parameters(), before, strict=True))
        same = [torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)]
        return all(same), changed > 10

    ranks(save, 2)
    assert ranks(load, tp) == [(True, True)] * tp


class GatedNorm(nn.Module):
    """The parameter of mamba-ssm's gated norm, which is not installed here."""

    def __init__(self, size, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


# What Megatron's mixer imports of packages that only run on GPUs. Its constructor makes a gated norm and uses nothing else.
STUBS = {
    "triton": dict(jit=lambda kernel: kernel),
    "triton.language": dict(constexpr=int),
    "mamba_ssm.ops.triton.layernorm_gated": dict(RMSNorm=GatedNorm),
    "mamba_ssm.ops.triton.selective_state_update": dict(selective_state_update=None),
    "mamba_ssm.ops.triton.ssd_combined": dict(mamba_chunk_scan_combined=None, mamba_split_conv1d_scan_combined=None),
}


def stub(name, contents):
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def megatrons_mixer(config, monkeypatch):
    """[Megatron's own MambaMixer, ours], and their sharded state dicts.

    What Megatron's needs of CUDA, triton and mamba-ssm is replaced; nothing is computed with it.
    """
    for name, contents in STUBS.items():
        monkeypatch.setitem(sys.modules, name, stub(name, contents))
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm import mamba_mixer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, random

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(random.CudaRNGStatesTracker, "fork", lambda *_: torch.random.fork_rng())
    groups = ProcessGroupCollection(
        tp=parallel_state.get_tensor_model_parallel_group(), cp=parallel_state.get_context_parallel_group()
    )
    parts = mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mixers = [
        mamba_mixer.MambaMixer(config, parts, 32, layer_number=1, pg_collection=groups),
        Mixer(config, 32, layer_number=1, pg_collection=groups, family="mamba2", hf_fields={}),
    ]
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return mixers, [mixer.sharded_state_dict("mixer.", (), metadata) for mixer in mixers]


def places(state):
    """{key in the checkpoint: (shape of the whole tensor, place of this rank's part, this copy's number)}."""
    parts = [tensor.build() if hasattr(tensor, "build") else [tensor] for tensor in state.values()]
    return {t.key: (t.global_shape, t.global_offset, t.replica_id) for part in parts for t in part}


@pytest.mark.parametrize("tp", (1, 2))
def test_checkpoints_have_the_tensors_of_megatrons_own_mixer(ranks, tp, monkeypatch):
    """In both directions: plain state dicts load, and distributed ones have the same keys, shapes, places and copies."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    def run(rank):
        join(tp)
        config = TransformerConfig(
            num_layers=1, hidden_size=32, num_attention_heads=4, mamba_state_dim=8, mamba_head_dim=8, mamba_num_groups=2,
            tensor_model_parallel_size=tp, **CPU,
        )  # fmt: skip
        with monkeypatch.context() as patched:
            (theirs, ours), (their_places, our_places) = megatrons_mixer(config, patched)
        state = {name: tensor for name, tensor in theirs.state_dict().items() if "_extra_state" not in name}
        expected = {key: place for key, place in places(their_places).items() if "_extra_state" not in key}
        assert places(our_places) == expected
        ours.load_state_dict(state)
        assert_same_bytes(ours.state_dict(), state)
        theirs.load_state_dict(ours.state_dict(), strict=False)
        return {name: getattr(ours.in_proj.weight, name).detach() for name in ours.rows}, state["in_proj.weight"]

    for fields, packed in ranks(run, tp):
        assert torch.equal(torch.cat([fields[name] for name in ("z", "x", "B", "C", "dt")]), packed)


@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("name", ("mamba2", "zamba2"))
def test_megatron_counts_each_gradient_once(ranks, name, tp, directory):
    """By its own rules, also where several ranks hold the same B and C."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    def run(rank):
        join(tp)
        counted = [
            p.numel()
            for n, p in new_model(directory(name), tp).named_parameters()
            if n.startswith("decoder.") and param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p)
        ]
        return sum(counted)

    directory(name)
    config = families.read(directory(name))
    fields = megatron_ssm.build(config).named_parameters()
    expected = sum(p.numel() for n, p in fields if n not in ("embeddings.weight", "lm_head.weight"))
    assert sum(ranks(run, tp)) == expected


@pytest.mark.parametrize("tp", (1, 2))
def test_state_dicts_of_transformer_engine_specs_load(ranks, tp):
    """There the norms are part of the linear layers that follow them, and each layer has an extra state."""

    def run(rank):
        join(tp)
        model = mamba_model(pattern="M*M-", num_layers=4, tensor_model_parallel_size=tp)
        state = model.state_dict()
        for theirs, ours in FUSED_NORMS.items():
            for name in [name for name in state if ours in name and "mixer.norm" not in name and "final" not in name]:
                state[name.replace(ours, theirs)] = state.pop(name) + 1
                state[name.replace(ours + "weight", theirs.rpartition(".")[0] + "._extra_state")] = None
        model.load_state_dict(state)
        return [layer.norm.weight for layer in model.decoder.layers if hasattr(layer, "norm")]

    for norms in ranks(run, tp):
        assert len(norms) == 2 and all((norm == 2).all() for norm in norms)


# Refusals


def transformer_config(**changes):
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = dict(num_layers=2, hidden_size=32, num_attention_heads=4, normalization="RMSNorm", mamba_num_groups=1)
    return TransformerConfig(**sizes | dict(mamba_state_dim=8, mamba_head_dim=8) | CPU | changes)


def mamba_model(spec=specs.mamba_stack_spec, pattern="MM", **changes):
    return hybrid_model(transformer_config(**changes), spec, 64, 64, pattern)


def gpt_model(spec=specs.gpt_layer_spec, **changes):
    from megatron.core.models.gpt import GPTModel

    return GPTModel(transformer_config(**changes), spec, 64, 64)


def zamba2_with_other_heads():
    return mamba_model(specs.stack_spec("zamba2", num_attention_heads=8))


def of_another_model(directory):
    load_hugging_face(mamba_model(num_layers=4, pattern="MMMM"), directory)


REFUSED = {
    "layer 2 of the pattern is 'E', which this stack spec does not have": lambda d: mamba_model(pattern="ME"),
    "layer 1 of the pattern is '-'": lambda d: mamba_model(specs.zamba2_stack_spec, "-M"),
    "normalization='LayerNorm': the layers of this spec have RMSNorm": lambda d: mamba_model(normalization="LayerNorm"),
    "64 channels do not divide into heads of 24": lambda d: mamba_model(mamba_head_dim=24),
    "num_attention_heads=8 of the layer spec is 4 in Megatron": lambda d: zamba2_with_other_heads(),
    "attention_dropout=0.1 is not supported": lambda d: mamba_model(specs.zamba2_stack_spec, "M*", attention_dropout=0.1),
    "fp8='hybrid' is not supported by the linear layers of this spec": lambda d: mamba_model(fp8="hybrid"),
    "fp4='e2m1' is not supported by the linear layers": lambda d: mamba_model(specs.zamba2_stack_spec, "M*", fp4="e2m1"),
    "fp8='e4m3' is not supported by the linear layers": lambda d: gpt_model(fp8="e4m3"),
    "fp4='e2m1' is not supported by the": lambda d: gpt_model(specs.with_core_attention(specs.gpt_layer_spec), fp4="e2m1"),
    "qk_layernorm=True is not supported by the attention": lambda d: mamba_model(pattern="M*", qk_layernorm=True),
    "add_qkv_bias=True is not": lambda d: mamba_model(specs.zamba2_stack_spec, "M*", add_qkv_bias=True),
    "window_size=\\(4, 0\\) is not": lambda d: mamba_model(specs.zamba_stack_spec, "M*", window_size=(4, 0)),
    "residual_in_fp32: hybrid layers have one": lambda d: HybridLayer(transformer_config(), None, residual_in_fp32=True),
    "residual_in_fp32: hybrid": lambda d: Stack(transformer_config(), None, "zamba2", {}, residual_in_fp32=True),
    "packed_seq_params": lambda d: mamba_model()(torch.zeros(1, 4).long(), None, None, packed_seq_params=object()),
    "only models that megatron_ssm's stack_spec built": lambda d: save_hugging_face(nn.Linear(1, 1), d),
    "a mamba2 model with layers \\*, - has no counterpart": lambda d: save_hugging_face(mamba_model(pattern="*-"), d),
    "has groups=2 in layers.0.mixer, but Megatron's model has 1": of_another_model,
}  # fmt: skip


@pytest.mark.parametrize("world", (1, 2))
def test_what_is_refused(ranks, world, directory):
    def run(rank):
        join()
        for message, make in REFUSED.items():
            with pytest.raises(ValueError, match=message):
                make(directory("mamba2"))

    directory("mamba2")
    ranks(run, world)


@pytest.mark.parametrize("world", (2, pytest.param(3, marks=pytest.mark.full)))
def test_pipelines_of_shared_blocks_are_refused(ranks, world):
    from megatron.core import parallel_state

    def run(rank):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
        with pytest.raises(ValueError, match=f"{world} pipeline stages: only the first has the embeddings"):
            sizes = dict(num_layers=world, pipeline_model_parallel_size=world, pipeline_dtype=torch.float32)
            mamba_model(specs.zamba2_stack_spec, "*" * world, **sizes)

    ranks(run, world)


@pytest.mark.parametrize(
    "name", [f"{kind}_stack_spec" for kind in ("mamba", "mamba1", "zamba", "zamba2")] + ["gpt_layer_spec"]
)
def test_specs_are_found_as_megatrons_scripts_find_them(name):
    """`--spec megatron_ssm.integrations.specs NAME`."""
    from megatron.core.transformer.spec_utils import ModuleSpec, import_module

    assert isinstance(import_module(("megatron_ssm.integrations.specs", name)), ModuleSpec)


@pytest.mark.parametrize("tp", (1, 2))
def test_initial_values_do_not_depend_on_the_number_of_ranks(ranks, tp):
    """Projections by Megatron's init methods, the rest as in state-spaces' code."""

    def run(tp):
        join(tp)
        torch.manual_seed(3)
        mixer = mamba_model(tensor_model_parallel_size=tp, init_method_std=0.5).decoder.layers[0].mixer
        return {name: p.detach() for name, p in mixer.named_parameters()}

    parts, (one,) = ranks(lambda rank: run(tp), tp), ranks(lambda rank: run(1), 1)
    for name in ("in_proj.weight.x", "conv.weight.x", "A_log", "dt_bias", "norm_weight"):
        assert torch.equal(torch.cat([part[name] for part in parts]), one[name])
    assert math.isclose(one["in_proj.weight.x"].std(), 0.5, rel_tol=0.1) and (one["A_log"] > 0).all()
