"""Directories that load refuses and save cannot write. Oracles: a table of broken directories, the files from before."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import megatron_ssm
from cases import oracle
from hf import INDEX, edit_config, in_two_files, rewritten, save_hf, tensors_in
from serving import attempt

__all__ = ["oracle"]


# What load refuses


def truncated(keep):
    """A corruption that truncates the weights to a fraction (float) or to a number of bytes (int)."""

    def corrupt(directory, file="model.safetensors"):
        data = (directory / file).read_bytes()
        (directory / file).write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])

    return corrupt


def one_of_two(corrupt):
    """A corruption of the second of two files."""

    def corrupt_second(directory):
        in_two_files(directory)
        corrupt(directory / "model-00002-of-00002.safetensors")

    return corrupt_second


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def bad_index(text):
    """A corruption that replaces the index of two files."""

    def corrupt(directory):
        in_two_files(directory)
        (directory / INDEX).write_text(text)

    return corrupt


def on_a_failing_disk(directory):
    """Reading config.json fails with EIO: its first bytes are those of memory that is not mapped."""
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to("/proc/self/mem")


NORM = "backbone.layers.1.norm.weight"
BROKEN = {  # name: (corruption of a valid directory, type of the error, words of its message)
    "no directory": (shutil.rmtree, FileNotFoundError, "does not exist"),
    "a disk that fails": (on_a_failing_disk, ValueError, "cannot read /"),
    "no configuration": (lambda d: (d / "config.json").unlink(), FileNotFoundError, "config.json does not exist"),
    "unknown model type": (lambda d: edit_config(d, model_type="gpt2"), ValueError, "supported: mamba, falcon_mamba,"),
    "unsupported field": (lambda d: edit_config(d, hidden_act="relu"), ValueError, "hidden_act='relu'"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), FileNotFoundError, "neither model.safetensors nor"),
    "empty file": (truncated(0), ValueError, "not a complete safetensors file"),
    "cut in the header": (truncated(100), ValueError, "not a complete safetensors file"),
    "cut in the data": (truncated(0.9), ValueError, "not a complete safetensors file"),
    "cut by a byte": (truncated(-1), ValueError, "not a complete safetensors file"),
    "a text file": (lambda d: (d / "model.safetensors").write_text("once " * 99), ValueError, "not a complete"),
    "one of two cut": (one_of_two(halve), ValueError, "model-00002-of-00002.safetensors is not a complete"),
    "one of two absent": (one_of_two(Path.unlink), FileNotFoundError, "model-00002-of-00002.safetensors is named in"),
    "index is no JSON": (bad_index("{"), ValueError, "is not an index"),
    "index is a list": (bad_index("[]"), ValueError, "is not an index"),
    "index names no file": (bad_index('{"weight_map": {"a": 1}}'), ValueError, "is not an index"),
    "index leads elsewhere": (bad_index('{"weight_map": {"a": "../x.safetensors"}}'), ValueError, "is not an index"),
    **{
        f"index names {name[:9]!r}": (bad_index(json.dumps({"weight_map": {"a": name}})), ValueError, "is not an index")
        for name in ("..", "/x.safetensors", "x.bin")
    },
    "tensor missing": (rewritten(lambda t: t.pop(NORM)), ValueError, f"has no tensor {NORM} (32,)"),
    "tensor too many": (rewritten(lambda t: t.update(extra=torch.ones(2))), ValueError, "1 tensors that a mamba2"),
    "wrong shape": (rewritten(lambda t: t.update({NORM: torch.ones(31)})), ValueError, f"{NORM} is (31,), its"),
    "another vocabulary": (lambda d: edit_config(d, vocab_size=60), ValueError, "is (61, 32), its"),
    "integers": (rewritten(lambda t: t.update({NORM: torch.ones(32).int()})), ValueError, f"{NORM} is I32, not"),
    "8-bit floats": (
        rewritten(lambda t: t.update({NORM: torch.ones(32).to(torch.float8_e4m3fn)})), ValueError, "is F8_E4M3",
    ),
    "another family": (lambda d: edit_config(d, model_type="mamba"), ValueError, "it lacks 6 tensors"),
    "more layers": (lambda d: edit_config(d, num_hidden_layers=3), ValueError, "has no tensor backbone.layers.2."),
    "10,000 layers": (
        lambda d: edit_config(d, num_hidden_layers=10_000), ValueError,
        "has no tensor backbone.layers.2.norm.weight (32,); it lacks 9998 whole layers",
    ),
    "two tensors missing": (
        rewritten(lambda t: [t.pop(name) for name in (NORM, "backbone.norm_f.weight")]), ValueError,
        f"has no tensor {NORM} (32,); it lacks 2 tensors",
    ),
    "fewer layers": (lambda d: edit_config(d, num_hidden_layers=1), ValueError, "tensors that a mamba2 model does not"),
    "untied without a head": (
        rewritten(lambda t: t.pop("lm_head.weight")), ValueError, "has no tensor lm_head.weight (61, 32)",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A directory with a valid model."""
    directory = tmp_path_factory.mktemp("good")
    save_hf(directory, "mamba2", num_hidden_layers=2, n_groups=2)
    return directory


def check_refusals(ranks, tp, source, cases, directory):
    """Every rank raises the same error of one line, and none hangs. cases: [(corruption, error, words)]."""
    directories = [shutil.copytree(source, directory / str(i)) for i in range(len(cases))]
    for (corrupt, *_), broken in zip(cases, directories, strict=True):
        corrupt(broken)

    def run(rank):
        megatron_ssm.load(source, dist.group.WORLD)
        return [attempt(megatron_ssm.load, broken, dist.group.WORLD) for broken in directories]

    answers, *others = ranks(run, tp)
    assert all(other == answers for other in others)
    for answer, (_, error, words) in zip(answers, cases, strict=True):
        assert answer is not None, f"no error: {words}"
        assert answer[0] == error.__name__ and words in answer[1] and "\n" not in answer[1]


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
def test_broken_directories(ranks, tp, good, tmp_path):
    check_refusals(ranks, tp, good, list(BROKEN.values()), tmp_path)


BLOCK = "model.layers.0.shared_transformer."
ADAPTER = f"{BLOCK}feed_forward.gate_up_proj_adapter_list.0.0.weight"
BROKEN_HYBRIDS = {  # of a model with two hybrid layers, each with its own block
    "a use less": (
        lambda d: edit_config(d, layers_block_type=["hybrid", "linear_attention"]),
        "has no tensor model.layers.1.input_layernorm.weight (32,)",
    ),
    "a layer less": (
        lambda d: edit_config(d, layers_block_type=["hybrid"], num_hidden_layers=1),
        "tensors that a zamba2 model does not use, such as model.layers.1.",
    ),
    "a layer more": (
        lambda d: edit_config(d, num_hidden_layers=3),
        "layers_block_type has 2 layers, num_hidden_layers=3",
    ),
    "2,000 blocks": (  # each layer holds adapters for half of the others, so their number is quadratic
        lambda d: edit_config(d, num_hidden_layers=2000, layers_block_type=["hybrid"] * 2000),
        "has no tensor model.layers.2.linear.weight (32, 32); it lacks 1998 whole layers",
    ),
    "three blocks": (lambda d: edit_config(d, tie_word_embeddings=False, num_mem_blocks=1), "has no tensor"),
    "no adapter": (rewritten(lambda t: t.pop(ADAPTER)), f"has no tensor {ADAPTER} (6, 32)"),
    "wider adapters": (lambda d: edit_config(d, adapter_rank=7), "its configuration says (7, 32)"),
    "adapters of attention": (
        lambda d: edit_config(d, use_shared_attention_adapter=True),
        f"has no tensor {BLOCK}self_attn.linear_q_adapter_list.0.0.weight (6, 64)",
    ),
    "fewer key/value heads": (lambda d: edit_config(d, num_key_value_heads=2), "k_proj.weight is (64, 64), its"),
    "a wider MLP": (lambda d: edit_config(d, intermediate_size=52), "its configuration says (104, 32)"),
    "dropout": (lambda d: edit_config(d, attention_dropout=0.1), "attention_dropout=0.1 is not implemented"),
    "untied": (lambda d: edit_config(d, tie_word_embeddings=False), "has no tensor"),
    "zamba": (lambda d: edit_config(d, model_type="zamba", hybrid_layer_ids=None), "has no tensor"),
}


@pytest.fixture(scope="module")
def good_hybrid(tmp_path_factory):
    """A directory with a valid Zamba2 model."""
    directory = tmp_path_factory.mktemp("hybrid")
    save_hf(directory, "zamba2", layers_block_type=["hybrid"] * 2, num_hidden_layers=2)
    edit_config(directory, hybrid_layer_ids=None)
    return directory


def test_broken_directories_of_a_hybrid(ranks, good_hybrid, tmp_path):
    cases = [(corrupt, ValueError, words) for corrupt, words in BROKEN_HYBRIDS.values()]
    check_refusals(ranks, 2, good_hybrid, cases, tmp_path)


# One tensor under several names


def missing(name):
    """A case (corruption, expected words): the tensor is missing."""
    return rewritten(lambda t: t.pop(name)), f"has no tensor {name} ("


def copied(change, name, copy):
    """A case (corruption, expected words): one tensor is stored under two names, and the second copy is changed."""

    def corrupt(tensors):
        tensors[copy] = change(tensors[name]).clone()

    return rewritten(corrupt), f"{name} and {copy} differ, but its configuration makes them one"


UNTIED = dict(layers_block_type=["hybrid"] * 3, num_hidden_layers=3, tie_word_embeddings=False)
TIED = dict(UNTIED, tie_word_embeddings=True)
ZAMBA = "model.layers.{}.shared_transf.self_attn.q_proj.weight"
ZAMBA2 = "model.layers.{}.shared_transformer.feed_forward."


@pytest.mark.parametrize("family", ("zamba", "zamba2"))
def test_no_tensor_of_an_untied_block_is_taken_from_another_layer(family, tmp_path):
    """This holds for blocks and adapters, even for unused adapters."""
    save_hf(tmp_path, family, **UNTIED, **dict(use_shared_attention_adapter=True) if family == "zamba2" else {})
    whole = tensors_in(tmp_path)
    names = [name for name in whole if ".shared_transf" in name]
    assert {name.split(".")[2] for name in names} == {"0", "1", "2"}
    for name in names:
        rest = {other: tensor for other, tensor in whole.items() if other != name}
        save_file(rest, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError) as caught:
            megatron_ssm.load(tmp_path)
        assert f"has no tensor {name} (" in str(caught.value) and "\n" not in str(caught.value)


SEVERAL_NAMES = [  # (family, changes to the small model, (corruption, words))
    ("zamba", UNTIED, missing(ZAMBA.format(2))),
    ("zamba2", UNTIED, missing(ZAMBA2.format(2) + "down_proj.weight")),
    ("zamba2", UNTIED, missing(ZAMBA2.format(0) + "gate_up_proj_adapter_list.2.0.weight")),
    ("zamba", TIED, copied(lambda t: t + 1e-6, ZAMBA.format(0), ZAMBA.format(1))),
    ("zamba2", TIED, copied(lambda t: t * 2, ZAMBA2.format(0) + "down_proj.weight", ZAMBA2.format(2) + "down_proj.weight")),
    *[(family, dict(tie_word_embeddings=True, num_hidden_layers=2), copied(change, embedding, "lm_head.weight"))
      for family, embedding in (("mamba", "backbone.embeddings.weight"), ("zamba2", "model.embed_tokens.weight"))
      for change in (lambda t: t.flip(0), lambda t: t[:-1], lambda t: t.T.contiguous())],
]  # fmt: skip


def test_a_tensor_is_never_taken_for_another(ranks, tmp_path):
    """Untied tensors must all exist, and all copies of a tied tensor must be equal."""
    directories = [tmp_path / str(i) for i in range(len(SEVERAL_NAMES))]
    for directory, (family, changes, (corrupt, _)) in zip(directories, SEVERAL_NAMES, strict=True):
        save_hf(directory, family, **changes)
        corrupt(directory)

    def run(rank):
        return [attempt(megatron_ssm.load, directory, dist.group.WORLD) for directory in directories]

    answers, *others = ranks(run, 2)
    assert all(other == answers for other in others)
    for answer, (family, _, (_, words)) in zip(answers, SEVERAL_NAMES, strict=True):
        assert answer is not None, f"{family}: not {words}"
        assert answer[0] == "ValueError" and words in answer[1] and "\n" not in answer[1]


@pytest.mark.parametrize("family", ("mamba", "zamba", "zamba2"))
def test_equal_copies_of_tied_tensors_load(family, tmp_path):
    """Older versions of transformers saved such copies."""
    changes = dict(TIED, num_mem_blocks=1) if family == "zamba2" else TIED if family == "zamba" else {}
    theirs = save_hf(tmp_path, family, **changes)
    all_tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    assert len(all_tensors) > len(tensors_in(tmp_path))
    save_file(all_tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(megatron_ssm.load(tmp_path)(ids), theirs(ids).logits, rtol=0, atol=3e-4)


# Ranks and arguments


@pytest.mark.parametrize("tp", (3, 4))
def test_ranks_that_cannot_split_a_model(ranks, tp, good, tmp_path):
    """8 heads do not divide over 3 ranks, nor 6 groups over 4."""
    directory = tmp_path / "model"
    save_hf(directory, "mamba2", num_hidden_layers=1, num_heads=12, hidden_size=48, n_groups=6)
    directory = good if tp == 3 else directory

    def run(rank):
        with pytest.raises(ValueError) as caught:
            megatron_ssm.load(directory, dist.group.WORLD)
        return str(caught.value)

    words = {3: "(8 % 3 = 2)", 4: "6 groups do not divide over 4 tensor-parallel ranks"}[tp]
    assert all(words in message and "\n" not in message for message in ranks(run, tp))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(context=object()), "context"),
        (dict(reduce="int3"), "reduce='int3'"),
        (dict(dtype=torch.int8), "dtype=torch.int8"),
        (dict(dtype="fp32"), "dtype=fp32"),
    ],
)
def test_arguments_of_load(arguments, words, good):
    with pytest.raises(ValueError) as caught:
        megatron_ssm.load(good, **arguments)
    assert words in str(caught.value)


# What save cannot do


def no_room(directory):
    """Limit the files that this process writes to 20 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def a_file_in_the_way(directory):
    """A file prevents the creation of the folder."""
    shutil.rmtree(directory)
    directory.write_text("a file")


def a_weight_that_cannot_be_replaced(directory):
    """A folder prevents the last step, which moves the weights into place."""
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()


@pytest.mark.parametrize("tp, dp", [(2, 2), pytest.param(1, 2, marks=pytest.mark.full)])
@pytest.mark.parametrize("prevent", (no_room, a_file_in_the_way, a_weight_that_cannot_be_replaced))
def test_save_fails_on_every_rank(ranks, tp, dp, prevent, oracle, tmp_path):
    """Every rank raises one line, and no partial file is left; if the disk is full, the earlier files do not change."""
    oracle = oracle("mamba2-2-groups")
    target = tmp_path / "target"
    save_hf(target, "mamba", num_hidden_layers=1)
    before = {path.name: path.read_bytes() for path in target.iterdir()}

    def run(rank):
        tensor = [dist.new_group(range(i * tp, (i + 1) * tp)) for i in range(dp)][rank // tp]
        data = [dist.new_group(range(i, tp * dp, tp)) for i in range(tp)][rank % tp]
        model = megatron_ssm.load(oracle.directory, tensor, data_group=data)
        if rank == 0:
            prevent(target)
        dist.barrier()
        with pytest.raises(OSError) as caught:
            megatron_ssm.save(model, target)
        dist.barrier()
        return str(caught.value)

    messages = ranks(run, tp * dp)
    assert set(messages) == {messages[0]}
    assert messages[0].startswith(f"cannot save to {target}: ") and "\n" not in messages[0]
    assert not list(tmp_path.glob("**/.saving*"))
    if prevent is no_room:
        assert {path.name: path.read_bytes() for path in target.iterdir()} == before
