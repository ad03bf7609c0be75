"""`megatron-ssm bench` in forks. Oracles: transformers' model of the same directory, its documentation."""

import json
from importlib.util import find_spec

import pytest
from programs import completed

from hf import save_hf
from megatron_ssm.checkpoints.convert import convert
from megatron_ssm.cli import main

FAST = ["--prompt-tokens", "40", "--new-tokens", "5", "--repetitions", "3"]
LLAMA = pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="llama-cpp-python is installed")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A hybrid whose model in transformers does not count positions itself, and whose matrices can be quantized."""
    directory = tmp_path_factory.mktemp("model")
    save_hf(directory, "bamba", hidden_size=64, mamba_n_heads=8, mamba_d_head=16, intermediate_size=64)
    return directory


def run(*arguments):
    """(exit code, stdout, stderr) of a command line of `bench`."""
    result = completed(["bench", *arguments])
    return result.returncode, result.stdout.decode(), result.stderr.decode()


def test_json_beside_transformers(directory):
    code, out, log = run(directory, *FAST, "--against", "transformers", "--weights", "bf16,fp32,int8", "--json")
    assert code == 0, log
    report = json.loads(out)
    rows = {f"{row['engine']} {row['weights']}": row for row in report["rows"]}
    ours = ["megatron-ssm bf16", "megatron-ssm fp32", "megatron-ssm int8"]
    assert list(rows) == [*ours, "transformers bf16", "transformers fp32"]
    assert (report["threads"], report["prompt_tokens"], report["new_tokens"], report["repetitions"]) == (1, 40, 5, 3)
    assert (report["ratio_to"], report["logits_reference"]) == ("transformers bf16", "transformers fp32")
    for name, row in rows.items():
        for phase in ("prefill", "decode"):
            speed, base = row[f"{phase}_tokens_per_s"], rows["transformers bf16"][f"{phase}_tokens_per_s"]
            assert row[f"{phase}_ratio"] == pytest.approx(speed / base) and row[f"{phase}_spread"] > 0, name
    off = {name: (row["logits_difference"], row["logits_difference_same_dtype"]) for name, row in rows.items()}
    assert 0 < off["megatron-ssm fp32"][0] == off["megatron-ssm fp32"][1] < 1e-4
    assert 1e-3 < off["megatron-ssm int8"][0] < 1
    assert 1e-3 < off["megatron-ssm bf16"][0] < 3 * off["transformers bf16"][0] < 1
    sizes = {name: row["weights_bytes"] for name, row in rows.items()}
    assert sizes["megatron-ssm fp32"] == pytest.approx(sizes["transformers fp32"], 1e-3)  # which has a buffer more
    assert sizes["megatron-ssm int8"] < sizes["megatron-ssm fp32"]


def test_the_table_alone(directory):
    """Without peers, in the dtype of the files, and no wider than a terminal."""
    flags = "--prompt-tokens 2 --new-tokens 1 --repetitions 3 --threads 2"  # threads wait for each other: few tokens
    code, out, _ = run(directory, *flags.split())
    assert code == 0 and max(map(len, out.splitlines()[1:])) <= 100
    assert out.startswith(f"{directory} on cpu, 2 threads: a prompt of 2 tokens")
    row = out.splitlines()[3].split()
    assert row[:2] == ["megatron-ssm", "fp32"] and row.count("1.00x") == 2
    assert "median of 3" in out and "megatron-ssm fp32 is 1.00x" in out


@pytest.mark.parametrize(
    "flags,message",
    [
        pytest.param("--against llama.cpp=x.gguf", "no package llama_cpp: pip install llama-cpp-python", marks=LLAMA),
        ("--against llama.cpp", "--against llama.cpp: expected transformers or llama.cpp=FILE.gguf"),
        ("--weights fp32,fp8", "--weights fp8: expected some of fp32,bf16,int8,int4"),
        ("--repetitions 2", "--repetitions 2 must be at least 3"),
    ],
)
def test_errors_of_flags(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(["bench", "nowhere", *flags.split()])
    out, line = capsys.readouterr()
    assert (out, line.count("\n")) == ("", 1) and message in line


def test_models_that_transformers_cannot_read(directory, tmp_path, monkeypatch):
    from transformers.models.auto import modeling_auto

    convert(directory, tmp_path / "int8", weights="int8")
    code, out, line = run(tmp_path / "int8", "--against", "transformers")
    assert (code, out, line.count("\n")) == (2, "", 1) and "matrices in int8" in line
    monkeypatch.delitem(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "bamba")
    code, out, line = run(directory, "--against", "transformers")
    assert (code, out, line.count("\n")) == (2, "", 1) and "no model of type bamba" in line
