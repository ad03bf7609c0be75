"""`convert`. Oracles: transformers' logits, and the names and configurations of state-spaces/mamba, written out here."""

import errno
import io
import json
import math
import os
import pickle
import re
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.support.launched import disks_work, small_disk
from commfabric.foundation.command_line import Failure
from hf import INDEX, hf_model
from megatron_ssm import families
from megatron_ssm.checkpoints.convert import Row, convert, hugging_face_config, state_spaces_config
from megatron_ssm.cli.main import main
from megatron_ssm.engine.text import write_byte_tokenizer

# What MambaLMHeadModel.save_pretrained writes for such models (mamba_ssm/models/config_mamba.py, modules/mamba*.py).
MODEL = dict(
    d_model=32, d_intermediate=0, n_layer=2, vocab_size=61, attn_layer_idx=[], attn_cfg={}, rms_norm=True,
    residual_in_fp32=True, fused_add_norm=True, pad_vocab_size_multiple=8, tie_embeddings=True,
)  # fmt: skip
CASES = {
    "mamba": (
        ("mamba", dict(num_hidden_layers=2, vocab_size=64)),
        dict(MODEL, ssm_cfg={"d_state": 8}),
    ),
    "mamba-biases-untied": (
        ("mamba", dict(num_hidden_layers=2, vocab_size=64, use_bias=True, tie_word_embeddings=False, time_step_rank=5)),
        dict(MODEL, ssm_cfg={"layer": "Mamba1", "d_state": 8, "bias": True, "dt_rank": 5}, tie_embeddings=False),
    ),
    "mamba2": (
        ("mamba2", dict(num_hidden_layers=2, vocab_size=64, tie_word_embeddings=True, n_groups=2)),
        dict(MODEL, ssm_cfg={"layer": "Mamba2", "d_state": 8, "headdim": 8, "ngroups": 2}),
    ),
    "mamba2-limit": (
        ("mamba2", dict(num_hidden_layers=2, vocab_size=64, time_step_limit=(0.02, 0.2), use_conv_bias=False)),
        dict(
            MODEL, vocab_size=64, pad_vocab_size_multiple=1, tie_embeddings=False,
            ssm_cfg={"layer": "Mamba2", "d_state": 8, "headdim": 8, "dt_limit": [0.02, 0.2], "conv_bias": False},
        ),
    ),
}  # fmt: skip
IDS = torch.arange(40).view(2, 20)


def their_state(model):
    """A transformers model's tensors under state-spaces' names."""
    state = {k.replace("backbone.embeddings.", "backbone.embedding."): v for k, v in model.state_dict().items()}
    state["lm_head.weight"] = model.lm_head.weight
    return state


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(transformers model, its directory, the directory that state-spaces would have written)."""
    (family, changes), config = CASES[request.param]
    model = hf_model(family, **changes)
    ours, theirs = tmp_path_factory.mktemp("hf"), tmp_path_factory.mktemp("ss")
    model.save_pretrained(ours)
    (theirs / "config.json").write_text(json.dumps(config))
    torch.save(their_state(model), theirs / "pytorch_model.bin")
    return model, ours, theirs


def logits(directory, model):
    """What transformers computes from a directory."""
    with torch.no_grad():
        return type(model).from_pretrained(directory).eval()(IDS).logits


def test_state_spaces_to_hugging_face(case, tmp_path):
    """transformers loads the result and computes the same logits; all tensors are bitwise equal."""
    model, _, theirs = case
    rows = convert(theirs, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "out", model), model(IDS).logits)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    expected = {k: v for k, v in model.state_dict().items() if k in tensors}
    assert set(model.state_dict()) - set(expected) <= {"lm_head.weight"}
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
    assert {row.source for row in rows} == set(their_state(model))
    assert {row.target for row in rows} - {""} == set(tensors)


def test_hugging_face_to_state_spaces(case, tmp_path):
    """The result has state-spaces' names, the same bytes, and an equivalent configuration."""
    model, ours, _ = case
    rows = convert(ours, tmp_path / "out")
    state = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    expected = their_state(model)
    assert state.keys() == expected.keys() == {row.target for row in rows}
    assert all(torch.equal(state[name], expected[name]) for name in state)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(written) == {*MODEL, "ssm_cfg"}
    assert families.from_dict(hugging_face_config(written)) == families.from_dict(
        {**families.read(ours).raw, **{f"{name}_token_id": 0 for name in ("bos", "eos", "pad")}}
    )


def test_there_and_back(case, tmp_path):
    """Converting back gives the original bytes, here in several files."""
    _, ours, _ = case
    convert(ours, tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back", file_bytes=20_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    back = {}
    for path in (tmp_path / "back").glob("*.safetensors"):
        back.update(load_file(path))
    tensors = load_file(ours / "model.safetensors")
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in back)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == back.keys()


def test_published_configurations():
    """The shapes of state-spaces/mamba-2.8b and mamba2-2.7b, whose ssm_cfg leaves nearly everything to defaults."""
    mamba = hugging_face_config(dict(d_model=2560, n_layer=64, vocab_size=50277, ssm_cfg={}, pad_vocab_size_multiple=8))
    config = families.from_dict(mamba)
    mixer = config.layers[0][0].operators[0].spec
    assert (config.family, config.vocab_size, mixer.channels) == ("mamba", 50280, 5120)
    assert (mixer.dt_rank, mixer.state_size, config.tie_embeddings) == (160, 16, True)
    mamba2 = hugging_face_config(
        dict(d_model=2560, n_layer=64, vocab_size=50277, ssm_cfg={"layer": "Mamba2"}, pad_vocab_size_multiple=16)
    )
    config = families.from_dict(mamba2)
    mixer = config.layers[0][0].operators[0].spec
    assert (config.vocab_size, mixer.heads, mixer.head_dim, mixer.groups) == (50288, 80, 64, 1)
    assert (mixer.state_size, mixer.dt_limit) == (128, (0.0, math.inf))
    assert state_spaces_config(config)["ssm_cfg"] == {"layer": "Mamba2"}


BROKEN_STATE = {
    "has no tensor backbone.norm_f.weight": lambda s: s.pop("backbone.norm_f.weight"),
    "has 1 tensors that a mamba model does not use, such as backbone.rotary": lambda s: s.update(
        {"backbone.rotary": torch.zeros(2)}
    ),
    "backbone.norm_f.weight is (3,), its configuration says (32,)": lambda s: s.update(
        {"backbone.norm_f.weight": torch.zeros(3)}
    ),
    "backbone.embedding.weight and lm_head.weight differ, but its configuration makes them one": lambda s: s.update(
        {"lm_head.weight": torch.zeros(64, 32)}
    ),
}
NOT_STORED = {
    "integers": torch.arange(32),
    "a number": 3,
    "an expanded view": torch.ones(1).expand(32),
    "sparse": torch.ones(32).to_sparse(),
    "on meta": torch.ones(32, device="meta"),
}
BROKEN_CONFIG = {
    "ssm_cfg.layer='Mamba3' is not supported": dict(ssm_cfg={"layer": "Mamba3"}),
    "ssm_cfg.D_has_hdim=True has no counterpart": dict(ssm_cfg={"layer": "Mamba2", "D_has_hdim": True}),
    "ssm_cfg.colour=3 has no counterpart": dict(ssm_cfg={"colour": 3}),
    "rms_norm=False has no counterpart": dict(rms_norm=False),
    "attn_layer_idx=[1] has no counterpart": dict(attn_layer_idx=[1]),
    "flavour=1 has no counterpart": dict(flavour=1),
    "n_layer=0 must be a positive integer": dict(n_layer=0),
    "pad_vocab_size_multiple=0 must be a positive integer": dict(pad_vocab_size_multiple=0),
    "pad_vocab_size_multiple='8' must be a positive integer": dict(pad_vocab_size_multiple="8"),
    "ssm_cfg.headdim=0 must be a positive integer": dict(ssm_cfg={"layer": "Mamba2", "headdim": 0}),
    "ssm_cfg.headdim='a' must be a positive integer": dict(ssm_cfg={"layer": "Mamba2", "headdim": "a"}),
    "ssm_cfg.expand=1.5 must be a positive integer": dict(ssm_cfg={"expand": 1.5}),
    "ssm_cfg.layer=['x'] is not supported": dict(ssm_cfg=["x"]),
    "ssm_cfg.layer=['Mamba2'] is not supported": dict(ssm_cfg={"layer": ["Mamba2"]}),
    "time_step_limit=5": dict(ssm_cfg={"layer": "Mamba2", "dt_limit": 5}),
    "time_step_limit=['a', 1]": dict(ssm_cfg={"layer": "Mamba2", "dt_limit": ["a", 1]}),
    "state_size='a' must be": dict(ssm_cfg={"d_state": "a"}),
    "state_size=0 must be": dict(ssm_cfg={"layer": "Mamba2", "d_state": 0}),
    "n_groups=[1] must be": dict(ssm_cfg={"layer": "Mamba2", "ngroups": [1]}),
    "time_step_rank=[] must be": dict(ssm_cfg={"dt_rank": []}),
}


@pytest.fixture
def theirs(tmp_path):
    """A state-spaces directory that a test may damage."""
    (family, changes), config = CASES["mamba"]
    directory = tmp_path / "theirs"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    torch.save(their_state(hf_model(family, **changes)), directory / "pytorch_model.bin")
    return directory


def assert_refused(source, target, words):
    """Assert that convert raises one line with these words and writes nothing."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        convert(source, target)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not target.exists()


@pytest.mark.parametrize("words", BROKEN_STATE)
def test_broken_tensors(theirs, tmp_path, words):
    """Tensors are missing, unknown, of another shape, or untied."""
    state = torch.load(theirs / "pytorch_model.bin", weights_only=True)
    BROKEN_STATE[words](state)
    torch.save(state, theirs / "pytorch_model.bin")
    assert_refused(theirs, tmp_path / "out", words)


@pytest.mark.parametrize("value", NOT_STORED.values(), ids=NOT_STORED)
def test_tensors_that_are_not_dense_floats(theirs, tmp_path, value):
    state = torch.load(theirs / "pytorch_model.bin", weights_only=True)
    torch.save(state | {"backbone.norm_f.weight": value}, theirs / "pytorch_model.bin")
    assert_refused(
        theirs, tmp_path / "out", "backbone.norm_f.weight is not a floating-point tensor that is stored in full"
    )


@pytest.mark.parametrize("words", BROKEN_CONFIG)
def test_configurations_without_a_counterpart(theirs, tmp_path, words):
    """Hugging Face's classes cannot express these settings, or the field is unknown or invalid."""
    (theirs / "config.json").write_text(json.dumps({**CASES["mamba"][1], **BROKEN_CONFIG[words]}))
    assert_refused(theirs, tmp_path / "out", words)


def test_null_in_a_configuration():
    """It is as if the field were left out."""
    ssm = {"layer": "Mamba2", "headdim": None, "flavour": None}
    with_nulls = {**MODEL, "ssm_cfg": ssm, "pad_vocab_size_multiple": None, "rms_norm": None, "colour": None}
    assert hugging_face_config(with_nulls) == hugging_face_config({**MODEL, "ssm_cfg": {"layer": "Mamba2"}})


class _RunsCode:
    def __reduce__(self):
        return exec, ("raise SystemExit('code in a checkpoint was run')",)


def test_damaged_files(theirs, tmp_path):
    """The file is truncated, contains code (which is not run), or is missing; or the configuration is missing."""
    path = theirs / "pytorch_model.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert_refused(theirs, tmp_path / "out", "is not a complete file of tensors")
    path.write_bytes(pickle.dumps(_RunsCode()))
    assert_refused(theirs, tmp_path / "out", "is not a complete file of tensors")
    path.unlink()
    assert_refused(theirs, tmp_path / "out", "holds neither model.safetensors nor")
    (theirs / "config.json").unlink()
    assert_refused(theirs, tmp_path / "out", "no model configuration")


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("zamba2", {}, "state-spaces' code has no zamba2 models"),
        ("falcon_mamba", {}, "state-spaces' code has no falcon_mamba models"),
        ("mamba", dict(layer_norm_epsilon=1e-6), "layer_norm_epsilon=1e-06 has no counterpart"),
    ],
)
def test_hugging_face_models_without_a_counterpart(tmp_path, family, changes, words):
    """state-spaces' code has no such family, or no such setting."""
    hf_model(family, num_hidden_layers=2, **changes).save_pretrained(tmp_path / "hf")
    assert_refused(tmp_path / "hf", tmp_path / "out", words)


def test_an_error_of_the_disk_leaves_nothing(theirs, tmp_path, monkeypatch):
    """It is one line, and the directory that was made is removed."""

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("megatron_ssm.checkpoints.hf_directory.save_file", fail)
    with pytest.raises(Failure, match=f"^cannot save to {tmp_path}/out: Input/output error$"):
        convert(theirs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not disks_work(), reason="mounting a small disk needs root")
@pytest.mark.parametrize("kind", ("hf", "state-spaces"))
def test_a_full_disk(tmp_path, capsys, kind):
    """One line says so. The target is as before: missing, or with the user's file."""
    hf_model("mamba2", num_hidden_layers=2, hidden_size=256, num_heads=64).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "state-spaces")
    source, model = tmp_path / kind, sum(t.nbytes for t in load_file(tmp_path / "hf/model.safetensors").values())
    capsys.readouterr()
    with small_disk(tmp_path / "disk", -(-model // 4096) * 4) as disk:
        for out, kept in ((disk / "new", []), (disk / "mine", ["README.md"])):
            if kept:
                out.mkdir()
                (out / kept[0]).touch()
            assert main(["convert", "--model", str(source), "--out", str(out)]) == 1
            said = capsys.readouterr()
            full = rf"megatron-ssm convert: cannot save to {out}: .*No space left on device.*\n"
            assert re.fullmatch(full, said.err) and said.out == "", said.err
            assert [path.name for path in disk.iterdir()] == ([out.name] if kept else [])
            assert not kept or [path.name for path in out.iterdir()] == kept


def contents(directory):
    """{name: bytes} of the files in a directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("existing", ("a file", "config.json", "model.safetensors", "pytorch_model.bin", INDEX))
def test_converting_onto_existing_files(theirs, case, tmp_path, capsys, existing):
    """For a file, or a directory with files of a model: exit code 2, one line, and nothing is changed."""
    out = tmp_path / "out"
    if existing == "a file":
        out.write_text("mine")
        words = f"{out} is not a directory"
    else:
        out.mkdir()
        (out / existing).write_text("mine")
        words = f"{out} already holds a model ({existing}); name another directory"
    for source in (theirs, case[1]):
        before = contents(source)
        assert main(["convert", "--model", str(source), "--out", str(out)]) == 2
        printed = capsys.readouterr()
        assert words in printed.err and printed.err.count("\n") == 1 and printed.out == ""
        assert contents(source) == before
        assert (out.read_text() if existing == "a file" else contents(out)) in ("mine", {existing: b"mine"})


def test_converting_into_a_directory_with_other_files(theirs, tmp_path):
    """The other files are kept."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("mine")
    convert(theirs, tmp_path / "out")
    assert {"README.md", "config.json", "model.safetensors"} <= set(contents(tmp_path / "out"))
    assert (tmp_path / "out" / "README.md").read_text() == "mine"


def test_command(theirs, tmp_path, capsys):
    """--dry-run and -v print a table with one line per tensor; wrong use is one line and exit code 2."""
    assert main(["convert", "--model", str(theirs), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["tensor", "becomes", "shape", "dtype"]
    assert "backbone.embedding.weight backbone.embeddings.weight 64 x 32 float32" in [
        " ".join(x.split()) for x in lines
    ]
    assert lines[-1] == f"{len(lines) - 2} tensors, nothing written (--dry-run)"
    assert main(["convert", "--model", str(theirs), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    fetch = (
        "hf download EleutherAI/gpt-neox-20b tokenizer.json tokenizer_config.json special_tokens_map.json --local-dir"
    )
    assert capsys.readouterr().out.splitlines()[-1] == f"{fetch} {tmp_path / 'out'}"
    (theirs / "tokenizer.json").write_text("{}")  # then it is copied, and there is nothing to fetch
    assert main(["convert", "--model", str(theirs), "--out", str(tmp_path / "complete"), "-v"]) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[: len(lines) - 1] == lines[:-1]
    assert again[-1] == f'next: megatron-ssm generate --model {tmp_path / "complete"} --prompt "Once upon a time"'
    shutil.rmtree(theirs)
    capsys.readouterr()
    assert main(["convert", "--model", str(theirs), "--dry-run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit) as left:
        main(["convert", "--model", str(theirs)])
    assert left.value.code == 2


def test_summary(tmp_path, monkeypatch, capsys):
    """Sizes of the files, what is not quantized, and the next command; at a terminal, stderr shows the progress."""
    model = hf_model("mamba2", num_hidden_layers=2, hidden_size=64, num_heads=16, vocab_size=300)
    model.save_pretrained(tmp_path / "hf")
    write_byte_tokenizer(tmp_path / "hf")
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    out = tmp_path / "a b"
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    capsys.readouterr()
    assert main(["convert", "--model", str(tmp_path / "hf"), "--weights", "int4", "--out", str(out)]) == 0
    assert "converting model.safetensors: 100%" in terminal.getvalue()
    first, _, head, *rows, _, last = capsys.readouterr().out.splitlines()
    count = len(load_file(tmp_path / "hf" / "model.safetensors"))
    before, after = ((each / "model.safetensors").stat().st_size / 1e3 for each in (tmp_path / "hf", out))
    sizes = f"{before / 1e3:.2f} MB -> {after:.2f} KB"
    assert re.fullmatch(rf"{count} tensors, {sizes}, in \d+\.\d s, written to {re.escape(str(out))}", first)
    assert re.split("  +", head) == ["tensors", "not in int4", "dtype", "size"]
    kept: dict[str, list[int]] = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("_proj.weight", "embeddings.weight", "lm_head.weight")):
            kept.setdefault(re.sub(r"\.\d+\.", ".N.", name), []).append(tensor.nbytes)
    expected = {name: (str(len(sizes)), f"{sum(sizes) / 1e3:.2f} KB") for name, sizes in kept.items()}
    found = [re.split("  +", row) for row in rows]
    assert {name: (count, size) for count, name, dtype, size in found if dtype == "float32"} == expected
    sizes = [float(row[-1].split()[0]) for row in found]
    assert sizes == sorted(sizes, reverse=True)
    assert last == f"next: megatron-ssm chat '{out}'"


def test_rows(case):
    """Shapes and dtypes are the tensors' own."""
    model, ours, _ = case
    for row in convert(ours):
        assert isinstance(row, Row) and row.dtype == "float32"
        assert row.shape == tuple(their_state(model)[row.target].shape)
