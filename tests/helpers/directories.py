"""Read and change the checkpoints in directories."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"


def tensors_in(directory):
    """{name: tensor} of all the safetensors files of a directory."""
    tensors = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def assert_same_bytes(ours, theirs):
    """Assert that two dictionaries of tensors have the same names, dtypes, shapes and bits."""
    __tracebackhide__ = True
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


def rewritten(change):
    """A function(directory) that applies `change` to the {name: tensor} of the one safetensors file there."""

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
