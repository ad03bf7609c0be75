"""Small checkpoints of every family for the tests of decoding and serving, which compare tokens of float64 models."""

import tempfile
from collections import OrderedDict
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from chosen import by_default

from hf import hf_model, save_hf
from megatron_ssm import load
from megatron_ssm.engine.text import write_byte_tokenizer

IDS = torch.arange(18).view(2, 9) % 61
VOCAB = 257  # that of the byte tokenizer; not divisible by any number of ranks

# Two layers use one shared block, if the family has any. In Zamba2, dt is often clamped.
FAMILIES = {
    "mamba": dict(num_hidden_layers=2),
    "falcon_mamba": dict(num_hidden_layers=2),
    "mamba2": dict(num_hidden_layers=2),
    "zamba": dict(num_hidden_layers=3),
    "zamba2": dict(
        num_hidden_layers=3, num_mem_blocks=1, use_shared_attention_adapter=True, use_mem_rope=True, time_step_min=0.1
    ),
    "nemotron_h": dict(num_hidden_layers=3, time_step_min=0.1),
    "granitemoehybrid": dict(num_hidden_layers=2),
    "bamba": dict(num_hidden_layers=2),
    "falcon_h1": dict(num_hidden_layers=2),
    "jamba": dict(num_hidden_layers=2),
    "qwen3_5_text": dict(num_hidden_layers=2),
    "qwen3_next": dict(num_hidden_layers=2),
    "olmo_hybrid": dict(num_hidden_layers=2),
}
families = pytest.mark.parametrize(
    "family", by_default(FAMILIES.keys() - {"granitemoehybrid", "bamba", "jamba", "qwen3_next"}, FAMILIES)
)
families_of_worlds = pytest.mark.parametrize(
    "world, chosen",
    (
        (1, ("mamba", "zamba2", "falcon_h1", "olmo_hybrid")),
        (2, ("mamba2", "zamba", "nemotron_h", "qwen3_5_text")),
        pytest.param(1, FAMILIES, marks=pytest.mark.full),
        pytest.param(2, FAMILIES, marks=pytest.mark.full),
    ),
)


_directory = tempfile.TemporaryDirectory(prefix="checkpoints-")


@cache
def checkpoint(family):
    """The directory of a family's model and its tokenizer; it is made once, so call it before ranks are forked."""
    directory = Path(_directory.name) / family
    save_hf(directory, family, vocab_size=VOCAB, **FAMILIES[family])
    write_byte_tokenizer(directory)
    return directory


def ids(*shape, seed=3, vocab=VOCAB):
    """Random token ids of this shape, the same in every call."""
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


# Prompts of several lengths

SMALL_VOCAB = 61
LENGTHS = torch.tensor([9, 4, 1, 6])
MASK = (torch.arange(9) >= 9 - LENGTHS[:, None]).long()  # zeros on the left; the ids there are any


@pytest.fixture(scope="module", params=["mamba", "mamba2"])
def small_checkpoint(request, tmp_path_factory):
    """(directory, the transformers model saved there), with SMALL_VOCAB ids and no tokenizer."""
    directory = tmp_path_factory.mktemp(request.param)
    return directory, save_hf(directory, request.param, vocab_size=SMALL_VOCAB, num_hidden_layers=2)


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory):
    """As `small_checkpoint`, where the family makes no difference."""
    directory = tmp_path_factory.mktemp("mamba2")
    return directory, save_hf(directory, "mamba2", vocab_size=SMALL_VOCAB, num_hidden_layers=2)


# Models on ranks


def on_ranks(ranks, world, directory, function, dtype=torch.float64, timeout=60, **options):
    """The result of function(model), equal on all ranks, with the model split over `world` ranks. options: of `load`."""
    first, *others = ranks(
        lambda rank: function(load(directory, dist.group.WORLD, dtype=dtype, **options)), world, timeout=timeout
    )
    assert all(other == first for other in others)
    return first


def on_ranks_of_families(ranks, world, function, chosen=tuple(FAMILIES)):
    """function(model) for the model of each family in turn, all on the same ranks: [{family: result} of each rank]."""
    directories = {family: checkpoint(family) for family in chosen}

    def run(rank):
        results = {}
        for family, directory in directories.items():
            model = load(directory, dist.group.WORLD, dtype=torch.float64)
            try:
                results[family] = function(model)
            except AssertionError as error:
                raise AssertionError(f"{family}: {error}") from error
        return results

    return ranks(run, world)


def attempt(function, *args, **kwargs):
    """The (type name, message) of the exception that the call raises; None if it raises none."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)


def save_table(directory, table, **changes):
    """A model whose logits are known: after token t, those of token u are table[t, u] times a constant.

    One layer that adds nothing, one-hot embeddings and an untied head: each logit is one nonzero product.
    """
    vocab = len(table)
    model = hf_model("mamba2", num_hidden_layers=1, vocab_size=vocab, tie_word_embeddings=False, **changes)
    with torch.no_grad():
        model.backbone.embeddings.weight.copy_(torch.eye(*model.backbone.embeddings.weight.shape))
        model.backbone.layers[0].mixer.out_proj.weight.zero_()
        model.backbone.norm_f.weight.fill_(model.config.hidden_size**-0.5)
        model.lm_head.weight[:, :vocab] = table.T
    model.save_pretrained(directory)
    return model


# Decoding token by token


def saved(directory, family, **changes):
    """Save a small model in the directory; returns the directory."""
    save_hf(directory, family, **{"num_hidden_layers": 2, **changes})
    return directory


@torch.no_grad()
def one_by_one(model, cached, first=4):
    """Logits of `model` for a prompt and then for one token at a time, with a cache that the model `cached` made."""
    cache = cached.new_cache(2)
    parts = [model(IDS[:, :first], cache=cache)]
    return torch.cat(parts + [model(IDS[:, t : t + 1], cache=cache) for t in range(first, IDS.shape[1])], dim=1)


def hooked(model):
    """Register a hook on a layer of the model."""
    model.layers[1].norm.register_forward_hook(lambda _, __, y: 2 * y)


def hooked_anew(model):
    """Remove all hooks of a layer by replacing their dictionary, as some users do, and register a hook."""
    model.layers[1].norm._forward_hooks = OrderedDict()
    hooked(model)
