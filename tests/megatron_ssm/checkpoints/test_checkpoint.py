"""Load and save. Oracles: the bytes of the tensors that transformers saved, and its logits for what we save."""

import contextlib
import copy
import json
import os
import re
import shutil
import signal

import pytest
import torch
import torch.distributed as dist
from chosen import by_default
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import megatron_ssm
from attention2d import Ring
from benchmarks.support.launched import disks_work, small_disk
from cases import CASES, groups_of, oracle, with_layers
from hf import CONFIGS, INDEX, assert_same_bytes, rewritten, save_hf, tensors_in
from megatron_ssm import families
from megatron_ssm.checkpoints.hf_directory import Writer
from serving import attempt

__all__ = ["oracle"]

# There and back

FEW = (
    "mamba-biases-untied", "mamba2-2-groups-biases-tied", "mamba2-4-groups", "zamba-2-heads-biases",
    "zamba2-4-groups-biases-adapters-untied", "nemotron-4-groups-biases", "granite-2-groups-biases-rope",
    "falcon-h1-gate-first-1-group-biases", "jamba-biases-tied",
)  # fmt: skip


@pytest.mark.parametrize("tp", by_default((2,), (1, 2, 4)))
@pytest.mark.parametrize("dtype", by_default((torch.bfloat16,), (torch.float32, torch.bfloat16)))
@pytest.mark.parametrize("name", by_default(FEW, [name for name in CASES if name != "olmo-rope-tied"]))
def test_saved_tensors_are_the_loaded_bytes(ranks, tp, dtype, name, oracle, tmp_path):
    """Saves one file and several, and loads and saves the latter again; transformers computes the same logits from them.

    transformers itself saves the convolutions of olmo-rope-tied with other sizes: as equal parts of their concatenation.
    """
    oracle = oracle(name, dtype)
    one, several, resaved = tmp_path / "one", tmp_path / "a" / "few", tmp_path / "again"

    def run(rank):
        model = megatron_ssm.load(oracle.directory, dist.group.WORLD, dtype=dtype)
        megatron_ssm.save(model, one)
        megatron_ssm.save(model, several, file_bytes=6000)
        megatron_ssm.save(megatron_ssm.load(several, dist.group.WORLD, dtype=dtype), resaved)

    ranks(run, tp)
    for directory in (one, several, resaved):
        assert_same_bytes(tensors_in(directory), tensors_in(oracle.directory))
        assert families.read(directory) == families.read(oracle.directory)
        assert not list(directory.glob(".*"))
    files = sorted(several.glob("*.safetensors"))
    assert len(files) > 2
    for tensors in map(load_file, files):
        is_one_parameter = len(tensors) == 1 or all(".experts." in name for name in tensors)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 6000 or is_one_parameter
    index = json.loads((several / INDEX).read_text())["weight_map"]
    assert {name for file in files for name in load_file(file)} == set(index)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(several, dtype=dtype, experts_implementation="eager").eval()
        assert torch.equal(theirs(oracle.ids[:, :5], use_cache=False).logits, oracle.logits(oracle.ids[:, :5]))


@pytest.mark.parametrize("tp, cp", [(1, 3), (2, 2)])
@pytest.mark.parametrize("name", ("mamba-biases-untied", "zamba2-4-groups-biases-adapters-untied"))
def test_context_ranks_write_the_same_files_as_one_rank(ranks, tp, cp, name, oracle, tmp_path):
    oracle = oracle(name)

    def run(rank):
        tensor, context = groups_of(rank, tp, cp)
        megatron_ssm.save(megatron_ssm.load(oracle.directory, tensor, context=Ring(context)), tmp_path / "many")

    ranks(run, tp * cp)
    megatron_ssm.save(megatron_ssm.load(oracle.directory), tmp_path / "one")
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "many").iterdir())
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "many" / file).read_bytes() for file in files)


@pytest.mark.parametrize("tp, dp", [(2, 2), pytest.param(1, 2, marks=pytest.mark.full)])
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


@pytest.mark.parametrize("tp,dp", [(2, 2), pytest.param(1, 2, marks=pytest.mark.full)])
def test_replicas_without_a_data_group_may_save_at_once(ranks, tp, dp, oracle, tmp_path):
    source = oracle("mamba2-1-group").directory

    def run(rank):
        group = dist.new_subgroups(tp)[0]
        model = megatron_ssm.load(source, group)
        for _ in range(4):
            megatron_ssm.save(model, tmp_path / "out", file_bytes=20_000)

    ranks(run, tp * dp)
    assert_same_bytes(tensors_in(tmp_path / "out"), tensors_in(source))
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize("tp", by_default((2,), (1, 2)))
@pytest.mark.parametrize("name", ("mamba2-2-groups", "zamba2-4-groups-biases-adapters-untied"))
def test_a_deep_copy_is_a_model(ranks, tp, name, oracle, tmp_path):
    source = oracle(name).directory

    def run(rank):
        model = copy.deepcopy(megatron_ssm.load(source, dist.group.WORLD))
        megatron_ssm.save(model, tmp_path / "out")

    ranks(run, tp)
    assert_same_bytes(tensors_in(tmp_path / "out"), tensors_in(source))


@pytest.mark.parametrize("tp", by_default((2,), (1, 2)))
def test_a_state_kept_in_fp32_is_saved_exactly(ranks, tp, oracle, tmp_path):
    """A bf16 model loaded from an fp32 checkpoint keeps A_log, D and dt bias in fp32, and all else in bf16."""
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


@pytest.mark.parametrize("tp", by_default((2,), (1, 2)))
def test_files_beside_the_weights(ranks, tp, tmp_path):
    """Tokenizer and generation files are copied, old weights removed, other files kept; also in the source directory."""
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


@pytest.mark.parametrize("umask", (0o022, 0o077))
@pytest.mark.parametrize("file_bytes", (10**9, 6000))
def test_permissions_are_those_of_the_umask(umask, file_bytes, oracle, tmp_path):
    """All files have the same permissions, so whoever can read config.json can read the weights."""
    model = megatron_ssm.load(oracle("mamba2-2-groups").directory)
    before = os.umask(umask)
    try:
        megatron_ssm.save(model, tmp_path / "out", file_bytes)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o666 & ~umask}


@pytest.mark.parametrize("tp", by_default((2,), (1, 2)))
def test_only_weights_of_an_earlier_model_are_removed(ranks, tp, oracle, tmp_path):
    """Other files are kept, even if their names begin with `model`."""
    source, target = oracle("mamba2-2-groups").directory, tmp_path / "out"
    target.mkdir()
    kept, removed = ("model_ema.safetensors", "models.safetensors"), ("model-00003-of-00009.safetensors", INDEX)
    for name in kept + removed:
        (target / name).write_text("a file")
    ranks(lambda rank: megatron_ssm.save(megatron_ssm.load(source, dist.group.WORLD), target), tp)
    assert {path.name for path in target.glob("model*")} == {"model.safetensors", *kept}


def killed_while_it_writes(directory):
    """The hidden folder that a writer leaves behind if it is killed (SIGKILL)."""
    before = set(directory.iterdir())
    writer = os.fork()
    if writer == 0:
        opened = Writer(directory)
        opened.open()
        opened.write("model.safetensors", {"a": torch.zeros(3)})
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(writer, 0)
    (left,) = set(directory.iterdir()) - before
    return left


@pytest.mark.parametrize("tp", by_default((2,), (1, 2)))
@pytest.mark.parametrize("kind", ("model", "adapters"))
def test_what_a_killed_writer_leaves_is_removed(ranks, tp, kind, oracle, tmp_path):
    """By the next writer; the folder of one that is still running stays, and can be completed."""
    running = Writer(tmp_path)
    running.open()
    left = killed_while_it_writes(tmp_path)
    assert list(left.iterdir())

    def save(rank):
        model = megatron_ssm.load(oracle("mamba2-2-groups").directory, dist.group.WORLD)
        if kind == "model":
            return megatron_ssm.save(model, tmp_path)
        megatron_ssm.add_lora(model, 2, 4.0, ("in_proj",))
        megatron_ssm.save_lora(model, tmp_path)

    ranks(save, tp)
    assert not left.exists() and list(tmp_path.glob(".*saving*")) == [running.hidden]
    running.write("model.safetensors", {"a": torch.ones(3)})
    running.close({}, None, {"a": "model.safetensors"})
    assert load_file(tmp_path / "model.safetensors")["a"].sum() == 3 and not list(tmp_path.glob(".*"))


@pytest.mark.skipif(not disks_work(), reason="mounting a small disk needs root")
@pytest.mark.parametrize("tp", by_default((2,), (1, 2)))
@pytest.mark.parametrize("kind", ("model", "adapters"))
def test_a_disk_without_inodes(ranks, tp, kind, oracle, tmp_path):
    """Every rank says so in one line. The directory that was made is removed."""
    source = oracle("mamba2-2-groups").directory
    with small_disk(tmp_path / "disk", 20_000, files=2) as disk:

        def save(rank):
            model = megatron_ssm.load(source, dist.group.WORLD)
            if kind == "adapters":
                megatron_ssm.add_lora(model, 2, 4.0, ("in_proj",))
            return attempt(megatron_ssm.save if kind == "model" else megatron_ssm.save_lora, model, disk / "out")

        answers = ranks(save, tp)
        assert os.listdir(disk) == []
    assert re.fullmatch(rf"cannot save to {disk}/out: .*No space left on device.*", answers[0][1]), answers
    assert answers == [("OSError", answers[0][1])] * tp


FILE_BYTES = {"one file": 10**9, "several files": 6000}


@pytest.mark.parametrize("earlier", FILE_BYTES)
@pytest.mark.parametrize("new", FILE_BYTES)
def test_an_interrupted_save_mixes_no_models(earlier, new, oracle, tmp_path, monkeypatch):
    """After any number of moved files, the directory holds the earlier model, the new model, or none that loads."""
    model = megatron_ssm.load(oracle("mamba2-2-groups").directory)
    with torch.no_grad():
        changed = copy.deepcopy(model)
        for parameter in changed.parameters():
            parameter += 1
    megatron_ssm.save(model, tmp_path / "earlier", FILE_BYTES[earlier])
    expected = [{name: p.sum().item() for name, p in m.named_parameters()} for m in (model, changed)]
    move, loaded_models = os.replace, []

    for moved in range(50):
        target, left = shutil.copytree(tmp_path / "earlier", tmp_path / str(moved)), [moved]

        def replace(source, destination, left=left):
            if not left[0]:
                raise SystemExit
            left[0] -= 1
            move(source, destination)

        with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
            patch.setattr(os, "replace", replace)
            megatron_ssm.save(changed, target, FILE_BYTES[new])
            break
        with contextlib.suppress(FileNotFoundError):
            found = {name: p.sum().item() for name, p in megatron_ssm.load(target).named_parameters()}
            loaded_models.append(expected.index(found))
    assert moved >= 2 and loaded_models == sorted(loaded_models)


@pytest.mark.parametrize("tp, dp", [(2, 1), (1, 3)])
def test_a_target_that_is_not_a_path(ranks, tp, dp, oracle, tmp_path):
    """The argument is wrong only on ranks that write nothing, and still all ranks raise."""
    source = oracle("mamba2-2-groups").directory

    def run(rank):
        groups = (dist.group.WORLD, None) if tp > 1 else (None, dist.group.WORLD)
        model = megatron_ssm.load(source, groups[0], data_group=groups[1])
        return attempt(megatron_ssm.save, model, tmp_path / "out" if rank == 0 else None)

    first, *others = ranks(run, tp * dp, timeout=20)
    assert first is not None and first[0] == "TypeError" and "(rank 1)" in first[1]
    assert others == [first] * (tp * dp - 1) and not (tmp_path / "out").exists()


# Earlier names of tensors


def old_embedding(name):
    return name.replace("backbone.embeddings.", "backbone.embedding.")


def no_prefix(name):
    return name.removeprefix("backbone.").removeprefix("model.")


def old_and_no_prefix(name):
    return no_prefix(old_embedding(name))


def only_the_head(name):
    return "lm_head.weight" if name.endswith((".embeddings.weight", ".embed_tokens.weight")) else name


FEWEST = {"zamba": 3, "zamba2": 3, "olmo_hybrid": 2}  # layers
RENAMED = [
    *((family, rename) for family in ("mamba", "mamba2") for rename in (old_embedding, old_and_no_prefix)),
    *((family, rename) for family in CONFIGS for rename in (no_prefix, only_the_head)),
]
RENAMED.remove(("nemotron_h", only_the_head))  # which is not tied


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
@pytest.mark.parametrize("family, rename", RENAMED)
def test_old_names_of_tensors(ranks, tp, family, rename, tmp_path):
    """When the model is saved again, its tensors have today's names."""
    tied = family != "nemotron_h"
    save_hf(tmp_path / "new", family, num_hidden_layers=FEWEST.get(family, 1), tie_word_embeddings=tied)
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    rewritten(lambda t: t.update({rename(name): t.pop(name) for name in list(t)}))(tmp_path / "old")
    assert set(tensors_in(tmp_path / "old")) != set(tensors_in(tmp_path / "new"))

    def run(rank):
        megatron_ssm.save(megatron_ssm.load(tmp_path / "old", dist.group.WORLD), tmp_path / "saved")

    ranks(run, tp)
    assert_same_bytes(tensors_in(tmp_path / "saved"), tensors_in(tmp_path / "new"))


def of_the_last_use(name):
    """The name of a shared block's tensor in its last use: layer 4 shares the block of layer 1, layer 5 that of 2."""
    layer = {"1": "4", "2": "5"}
    return re.sub(r"layers\.([12])(\.shared_trans)", lambda found: f"layers.{layer[found[1]]}{found[2]}", name)


@pytest.mark.parametrize("tp", (2, pytest.param(4, marks=pytest.mark.full)))
@pytest.mark.parametrize("family", ("zamba", "zamba2"))
@pytest.mark.parametrize("copied", (True, False), ids=("also", "only"))
def test_a_shared_block_under_the_name_of_another_use(ranks, tp, family, copied, tmp_path):
    """The tensors are stored under that name too, or only under that name."""
    extra = dict(use_shared_attention_adapter=True) if family == "zamba2" else {}
    save_hf(tmp_path / "first", family, **extra)
    shutil.copytree(tmp_path / "first", tmp_path / "other")

    def rename(tensors):
        renamed = {of_the_last_use(name): tensor.clone() for name, tensor in tensors.items()}
        if not copied:
            tensors.clear()
        tensors.update(renamed)

    rewritten(rename)(tmp_path / "other")
    first, other = (set(tensors_in(tmp_path / place)) for place in ("first", "other"))
    assert len(other - first) > 8 and copied == (first < other)

    def run(rank):
        megatron_ssm.save(megatron_ssm.load(tmp_path / "other", dist.group.WORLD), tmp_path / "saved")

    ranks(run, tp)
    assert_same_bytes(tensors_in(tmp_path / "saved"), tensors_in(tmp_path / "first"))


@pytest.mark.parametrize("tp", by_default((2,), (1, 2)))
def test_a_tied_head_may_be_in_the_file(ranks, tp, tmp_path):
    save_hf(tmp_path / "tied", "mamba", num_hidden_layers=1)
    shutil.copytree(tmp_path / "tied", tmp_path / "both")
    rewritten(lambda t: t.update({"lm_head.weight": t["backbone.embeddings.weight"].clone()}))(tmp_path / "both")

    def run(rank):
        megatron_ssm.save(megatron_ssm.load(tmp_path / "both", dist.group.WORLD), tmp_path / "saved")

    ranks(run, tp)
    assert_same_bytes(tensors_in(tmp_path / "saved"), tensors_in(tmp_path / "tied"))


@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups", "falcon", "zamba2-1-group", *FEW[3:]))
def test_a_model_that_was_never_a_file(name, tmp_path):
    """A model that was built, initialized and saved is read by transformers, which computes the same logits."""
    family, changes = CASES[name]
    save_hf(tmp_path / "shape", family, **with_layers(changes))
    model = megatron_ssm.initialize(megatron_ssm.build(families.read(tmp_path / "shape")), seed=1)
    megatron_ssm.save(model, tmp_path / "new")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=0, atol=5e-5)
