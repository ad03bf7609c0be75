"""Weights in pytorch_model.bin, and the checkpoint's own dtype. Oracle: the same tensors in safetensors."""

import json

import pytest
import torch
import torch.distributed as dist

import megatron_ssm
from hf import edit_config, save_hf, tensors_in
from megatron_ssm.checkpoints.convert import convert

IDS = torch.arange(12).view(2, 6)
BIN, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


@pytest.fixture
def directories(tmp_path):
    """A directory with safetensors, and one that is to hold the same tensors; the tensors."""
    save_hf(tmp_path / "safe", "mamba2", num_hidden_layers=2, n_groups=2, tie_word_embeddings=True)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/config.json").write_bytes((tmp_path / "safe/config.json").read_bytes())
    return tmp_path / "safe", tmp_path / "torch", tensors_in(tmp_path / "safe")


def in_one_file(directory, tensors):
    """As transformers wrote it: with the copy of a tied tensor."""
    torch.save({**tensors, "lm_head.weight": tensors["backbone.embeddings.weight"]}, directory / BIN)


def in_two_files(directory, tensors):
    """Two files and their index."""
    files = {name: f"pytorch_model-{1 + i % 2:05d}-of-00002.bin" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in files if files[name] == file}, directory / file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.mark.parametrize("write", (in_one_file, in_two_files))
def test_files_of_torch(ranks, directories, write):
    """`load` on two ranks, and `convert`, which writes the same bytes for both."""
    safe, torch_files, tensors = directories
    write(torch_files, tensors)

    def run(rank):
        models = [megatron_ssm.load(directory, dist.group.WORLD) for directory in (safe, torch_files)]
        with torch.no_grad():
            return torch.equal(*(model(IDS) for model in models))

    assert ranks(run, 2) == [True, True]
    for directory in (safe, torch_files):
        convert(directory, directory / "converted")
    assert (safe / "converted" / BIN).read_bytes() == (torch_files / "converted" / BIN).read_bytes()


class RunsCode:
    """A pickle of this prints when it is read."""

    def __reduce__(self):
        return print, ("code in a checkpoint was run",)


def test_damaged_files_of_torch(directories, capsys):
    """They are refused in one line that names the file, and no code in them is run."""
    _, directory, tensors = directories

    def refused(words):
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            megatron_ssm.load(directory)
        assert words in str(caught.value) and "\n" not in str(caught.value)

    in_two_files(directory, tensors)
    second = directory / "pytorch_model-00002-of-00002.bin"
    second.write_bytes(second.read_bytes()[:-99])
    refused(f"{second} is not a complete file of tensors")
    second.unlink()
    refused(f"{second} is named in {INDEX} but does not exist")
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    refused("is not an index of .bin files in its directory")
    torch.save({"a": RunsCode()}, directory / BIN)
    refused(f"{directory / BIN} is not a complete file of tensors")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "changes, dtype",
    [
        (dict(dtype=None), torch.bfloat16),  # of the tensors
        (dict(dtype=None, torch_dtype="float64"), torch.float64),
        (dict(dtype="float16", torch_dtype="float64"), torch.float16),
    ],
)
def test_the_dtype_of_a_checkpoint(tmp_path, changes, dtype):
    """config.json says it, else the tensors have it."""
    save_hf(tmp_path, "mamba", num_hidden_layers=1, dtype=torch.bfloat16)
    edit_config(tmp_path, **changes)
    model = megatron_ssm.load(tmp_path)
    assert model.dtype == model.embeddings.weight.dtype == dtype
    assert megatron_ssm.load(tmp_path, dtype=torch.float32).dtype == torch.float32
    assert megatron_ssm.load(tmp_path, dtype="float16").dtype == torch.float16


@pytest.mark.parametrize("name", ("int8", "bf16", "float8_e4m3fn", 3))
def test_dtypes_that_are_not_one(tmp_path, name):
    """In config.json, or as an argument."""
    save_hf(tmp_path, "mamba", num_hidden_layers=1)
    edit_config(tmp_path, dtype=name)
    with pytest.raises(ValueError, match=f"dtype={name} is neither auto nor a floating-point torch dtype"):
        megatron_ssm.load(tmp_path)
    with pytest.raises(ValueError, match=f"dtype={name} is neither auto nor a floating-point torch dtype"):
        megatron_ssm.load(tmp_path, dtype=name)
