"""Load and save; oracle: the bytes of the tensors that transformers wrote, and the logits it computes from ours."""

import copy
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import megatron_ssm
from cases import CASES, oracle
from hf import save_hf
from megatron_ssm import Config

__all__ = ["oracle"]

INDEX = "model.safetensors.index.json"


def tensors_in(directory):
    """{name: tensor} of all the safetensors files of a directory."""
    tensors = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def assert_same_bytes(ours, theirs):
    """Names, dtypes, shapes and every bit."""
    __tracebackhide__ = True
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


def rewritten(change):
    """A change of the tensors of a one-file directory."""

    def corrupt(directory):
        tensors = tensors_in(directory)
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return corrupt


def in_two_files(directory):
    """Split a one-file directory into two files and an index."""
    tensors = tensors_in(directory)
    (directory / "model.safetensors").unlink()
    weight_map = {name: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, directory / file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit_config(directory, **changes):
    """Change fields of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# There and back

FEW = ("mamba-biases-untied", "mamba2-2-groups-biases-tied", "mamba2-4-groups")


@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.full) for n in CASES])
def test_saved_tensors_are_the_loaded_bytes(ranks, tp, dtype, name, oracle, tmp_path):
    """In one file, and in several (from which it is loaded once more); transformers reads them to the same logits."""
    oracle = oracle(name, dtype)
    one, several, again = tmp_path / "one", tmp_path / "a" / "few", tmp_path / "again"

    def run(rank):
        model = megatron_ssm.load(oracle.directory, dist.group.WORLD, dtype=dtype)
        megatron_ssm.save(model, one)
        megatron_ssm.save(model, several, file_bytes=6000)
        megatron_ssm.save(megatron_ssm.load(several, dist.group.WORLD, dtype=dtype), again)

    ranks(run, tp)
    for directory in (one, several, again):
        assert_same_bytes(tensors_in(directory), tensors_in(oracle.directory))
        assert Config.read(directory) == Config.read(oracle.directory)
        assert not list(directory.glob(".*"))
    files = sorted(several.glob("*.safetensors"))
    assert len(files) > 2
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 6000 or len(load_file(file)) == 1 for file in files)
    index = json.loads((several / INDEX).read_text())["weight_map"]
    assert {name for file in files for name in load_file(file)} == set(index)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(several, dtype=dtype).eval()
        assert torch.equal(theirs(oracle.ids[:, :5]).logits, oracle.model(oracle.ids[:, :5]).logits)


@pytest.mark.parametrize("tp, dp", [(1, 2), (2, 2)])
def test_one_replica_writes(ranks, tp, dp, oracle, tmp_path):
    """Every data-parallel rank calls save; the second replica holds other weights, which must not be the ones saved."""
    oracle = oracle("mamba2-2-groups")

    def run(rank):
        tensor = [dist.new_group(range(i * tp, (i + 1) * tp)) for i in range(dp)][rank // tp]
        data = [dist.new_group(range(i, tp * dp, tp)) for i in range(tp)][rank % tp]
        model = megatron_ssm.load(oracle.directory, tensor, data_group=data)
        with torch.no_grad():
            model.norm_f.weight.add_(rank // tp)
        megatron_ssm.save(model, tmp_path / "saved")

    ranks(run, tp * dp)
    assert_same_bytes(tensors_in(tmp_path / "saved"), tensors_in(oracle.directory))


@pytest.mark.parametrize("tp,dp", [(1, 2), (2, 2)])
def test_replicas_that_know_nothing_of_each_other_may_save_at_once(ranks, tp, dp, oracle, tmp_path):
    source = oracle("mamba2-1-group").directory

    def run(rank):
        group = dist.new_subgroups(tp)[0]
        model = megatron_ssm.load(source, group)
        for _ in range(4):
            megatron_ssm.save(model, tmp_path / "out", file_bytes=20_000)

    ranks(run, tp * dp)
    assert_same_bytes(tensors_in(tmp_path / "out"), tensors_in(source))
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_deep_copy_is_a_model(ranks, tp, oracle, tmp_path):
    source = oracle("mamba2-2-groups").directory

    def run(rank):
        model = copy.deepcopy(megatron_ssm.load(source, dist.group.WORLD))
        megatron_ssm.save(model, tmp_path / "out")

    ranks(run, tp)
    assert_same_bytes(tensors_in(tmp_path / "out"), tensors_in(source))


@pytest.mark.parametrize("tp", (1, 2))
def test_a_state_kept_in_fp32_is_saved_exactly(ranks, tp, oracle, tmp_path):
    """A bf16 model of an fp32 checkpoint: its A_log, D and dt bias have no bf16 form, everything else has."""
    oracle = oracle("mamba2-2-groups")

    def run(rank):
        model = megatron_ssm.load(oracle.directory, dist.group.WORLD, dtype=torch.bfloat16)
        megatron_ssm.save(model, tmp_path / "saved")

    ranks(run, tp)
    wide = ("A_log", ".D", "dt_bias")
    theirs = tensors_in(oracle.directory)
    expected = {name: t if name.endswith(wide) else t.to(torch.bfloat16) for name, t in theirs.items()}
    assert_same_bytes(tensors_in(tmp_path / "saved"), expected)


COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


@pytest.mark.parametrize("tp", (1, 2))
def test_what_lies_beside_the_weights(ranks, tp, tmp_path):
    """Tokenizer and generation files come along, old weights go, other files stay; also over the loaded directory."""
    source, target = tmp_path / "source", tmp_path / "target"
    save_hf(source, "mamba", num_hidden_layers=1)
    for name in (*COMPANIONS, "README.md"):
        (source / name).write_text(f"{name} of the source")
    target.mkdir()
    for name in ("model-00001-of-00002.safetensors", INDEX, "tokenizer.json", "notes.txt"):
        (target / name).write_text("of the target")

    def run(rank):
        model = megatron_ssm.load(source, dist.group.WORLD)
        megatron_ssm.save(model, target)
        megatron_ssm.save(model, source, file_bytes=6000)

    whole = tensors_in(source)
    ranks(run, tp)
    names = {path.name for path in target.iterdir()}
    assert names == {"model.safetensors", "config.json", "notes.txt", *COMPANIONS}
    for directory in (source, target):
        assert_same_bytes(tensors_in(directory), whole)
        assert all((directory / name).read_text() == f"{name} of the source" for name in COMPANIONS)
    assert not (source / "model.safetensors").exists() and (source / INDEX).exists()


# Names that tensors have had


def old_embedding(name):
    return name.replace("backbone.embeddings.", "backbone.embedding.")


def no_prefix(name):
    return name.removeprefix("backbone.")


def old_and_no_prefix(name):
    return no_prefix(old_embedding(name))


def only_the_head(name):
    return "lm_head.weight" if name == "backbone.embeddings.weight" else name


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
@pytest.mark.parametrize("family", ("mamba", "mamba2"))
@pytest.mark.parametrize("rename", (old_embedding, no_prefix, old_and_no_prefix, only_the_head))
def test_old_names_of_tensors(ranks, tp, family, rename, tmp_path):
    """Saved again, they have today's names."""
    save_hf(tmp_path / "new", family, num_hidden_layers=1, tie_word_embeddings=True)
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    rewritten(lambda t: t.update({rename(name): t.pop(name) for name in list(t)}))(tmp_path / "old")
    assert set(tensors_in(tmp_path / "old")) != set(tensors_in(tmp_path / "new"))

    def run(rank):
        megatron_ssm.save(megatron_ssm.load(tmp_path / "old", dist.group.WORLD), tmp_path / "saved")

    ranks(run, tp)
    assert_same_bytes(tensors_in(tmp_path / "saved"), tensors_in(tmp_path / "new"))


@pytest.mark.parametrize("tp", (1, 2))
def test_a_tied_head_may_be_in_the_file(ranks, tp, tmp_path):
    save_hf(tmp_path / "tied", "mamba", num_hidden_layers=1)
    shutil.copytree(tmp_path / "tied", tmp_path / "both")
    rewritten(lambda t: t.update({"lm_head.weight": t["backbone.embeddings.weight"].clone()}))(tmp_path / "both")

    def run(rank):
        megatron_ssm.save(megatron_ssm.load(tmp_path / "both", dist.group.WORLD), tmp_path / "saved")

    ranks(run, tp)
    assert_same_bytes(tensors_in(tmp_path / "saved"), tensors_in(tmp_path / "tied"))


# What load refuses


def truncated(keep):
    """A corruption that cuts the weights to a part, or to so many bytes."""

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


A_NORM = "backbone.layers.1.norm.weight"
BROKEN = {  # name: (what is done to a good directory, the error, what its message must contain)
    "no directory": (shutil.rmtree, FileNotFoundError, "is not a directory"),
    "no configuration": (lambda d: (d / "config.json").unlink(), FileNotFoundError, "config.json does not exist"),
    "unknown model type": (lambda d: edit_config(d, model_type="gpt2"), ValueError, "supported: mamba, mamba2"),
    "unsupported field": (lambda d: edit_config(d, hidden_act="relu"), ValueError, "hidden_act='relu'"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), FileNotFoundError, "neither model.safetensors nor"),
    "empty file": (truncated(0), ValueError, "not a whole safetensors file"),
    "cut in the header": (truncated(100), ValueError, "not a whole safetensors file"),
    "cut in the data": (truncated(0.9), ValueError, "not a whole safetensors file"),
    "cut by a byte": (truncated(-1), ValueError, "not a whole safetensors file"),
    "a text file": (lambda d: (d / "model.safetensors").write_text("once " * 99), ValueError, "not a whole"),
    "one of two cut": (one_of_two(halve), ValueError, "model-00002-of-00002.safetensors is not a whole"),
    "one of two absent": (one_of_two(Path.unlink), FileNotFoundError, "model-00002-of-00002.safetensors is named in"),
    "index is no JSON": (bad_index("{"), ValueError, "is not an index"),
    "index is a list": (bad_index("[]"), ValueError, "is not an index"),
    "index names no file": (bad_index('{"weight_map": {"a": 1}}'), ValueError, "is not an index"),
    "index leads elsewhere": (bad_index('{"weight_map": {"a": "../x.safetensors"}}'), ValueError, "is not an index"),
    "tensor missing": (rewritten(lambda t: t.pop(A_NORM)), ValueError, f"has no tensor {A_NORM} (32,)"),
    "tensor too many": (rewritten(lambda t: t.update(extra=torch.ones(2))), ValueError, "1 tensors that a mamba2"),
    "wrong shape": (rewritten(lambda t: t.update({A_NORM: torch.ones(31)})), ValueError, f"{A_NORM} is (31,), its"),
    "another vocabulary": (lambda d: edit_config(d, vocab_size=60), ValueError, "is (61, 32), its"),
    "integers": (rewritten(lambda t: t.update({A_NORM: torch.ones(32).int()})), ValueError, f"{A_NORM} is I32, not"),
    "8-bit floats": (
        rewritten(lambda t: t.update({A_NORM: torch.ones(32).to(torch.float8_e4m3fn)})), ValueError, "is F8_E4M3",
    ),
    "another family": (lambda d: edit_config(d, model_type="mamba"), ValueError, "its configuration says"),
    "more layers": (lambda d: edit_config(d, num_hidden_layers=3), ValueError, "has no tensor backbone.layers.2."),
    "fewer layers": (lambda d: edit_config(d, num_hidden_layers=1), ValueError, "tensors that a mamba2 model does not"),
    "untied without a head": (
        rewritten(lambda t: t.pop("lm_head.weight")), ValueError, "has no tensor lm_head.weight (61, 32)",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A good directory."""
    directory = tmp_path_factory.mktemp("good")
    save_hf(directory, "mamba2", num_hidden_layers=2, n_groups=2)
    return directory


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
@pytest.mark.parametrize("broken", BROKEN)
def test_broken_directories(ranks, tp, broken, good, tmp_path):
    """Every rank says the same, in one line, and sends nothing."""
    corrupt, error, words = BROKEN[broken]
    directory = tmp_path / "broken"
    shutil.copytree(good, directory)
    corrupt(directory)

    def run(rank):
        with pytest.raises(error) as caught:
            megatron_ssm.load(directory, dist.group.WORLD)
        return str(caught.value)

    messages = ranks(run, tp)
    assert words in messages[0] and "\n" not in messages[0]
    assert set(messages) == {messages[0]}


@pytest.mark.parametrize("tp", (3, 4))
def test_ranks_that_cannot_split_a_model(ranks, tp, good, tmp_path):
    """8 heads over 3 ranks; 6 groups over 4."""
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
        (dict(dtype="float32"), "dtype='float32'"),
    ],
)
def test_arguments_of_load(arguments, words, good):
    with pytest.raises(ValueError) as caught:
        megatron_ssm.load(good, **arguments)
    assert words in str(caught.value)


# What save cannot do


def no_room(directory):
    """From now on this process can write no file longer than 20 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def a_file_in_the_way(directory):
    """A folder that cannot be made."""
    shutil.rmtree(directory)
    directory.write_text("a file")


def a_weight_that_cannot_be_replaced(directory):
    """The last step, moving into place, fails."""
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()


@pytest.mark.parametrize("tp, dp", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("prevent", (no_room, a_file_in_the_way, a_weight_that_cannot_be_replaced))
def test_save_fails_on_every_rank(ranks, tp, dp, prevent, oracle, tmp_path):
    """One line, no hang, nothing half-written; where only the disk is full, what was there can still be loaded."""
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


@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups"))
def test_a_model_that_was_never_a_file(name, tmp_path):
    """Built from a configuration, initialized, saved: transformers reads it, and computes what we do."""
    family, changes = CASES[name]
    save_hf(tmp_path / "shape", family, **{**changes, "num_hidden_layers": 2})
    model = megatron_ssm.initialize(megatron_ssm.build(Config.read(tmp_path / "shape")), seed=1)
    megatron_ssm.save(model, tmp_path / "new")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=0, atol=5e-5)
