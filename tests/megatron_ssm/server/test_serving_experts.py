"""`generate --ep` and `serve --ep` in processes. Oracles: transformers' greedy tokens, and `generate` on one rank."""

import json
import re

import pytest
from programs import completed

from hf import save_hf
from megatron_ssm.cli import main as cli
from megatron_ssm.engine.text import write_byte_tokenizer
from servers import expected, server
from serving import VOCAB, checkpoint

PROMPT = "Some text"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model with eight experts in each layer."""
    directory = tmp_path_factory.mktemp("experts")
    save_hf(directory, "qwen3_5_moe_text", vocab_size=VOCAB, num_hidden_layers=2)
    write_byte_tokenizer(directory)
    return directory


def output(directory, *flags):
    """The object that `generate` prints on local ranks."""
    command = ["generate", "--model", directory, "--prompt", PROMPT, "--max-new-tokens", 12, "--ignore-eos", "--json"]
    done = completed([*command, *flags])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("flags", (("--ep", 2), ("--tp", 2, "--ep", 2)), ids=str)
def test_generate(directory, flags):
    """One all-reduce of the hidden state for each layer and token more than without."""
    alone, report = output(directory), output(directory, *flags)
    assert report["tokens"] == alone["tokens"] and report["ep"] == 2
    before = alone if flags[0] == "--ep" else output(directory, "--tp", 2)
    more = report["bytes_sent_per_token"] - before["bytes_sent_per_token"]
    assert more == 2 * 32 * 4 + 8  # and the token, which the first rank chooses


@pytest.mark.parametrize("tp", (1, pytest.param(2, marks=pytest.mark.full)))
def test_serve(directory, tmp_path, tp):
    with server(directory, tmp_path / "log", "--slots", 2, "--ep", 2, tp=tp) as running:
        bodies = [
            dict(prompt=PROMPT, max_tokens=9, temperature=0),
            dict(prompt="x", max_tokens=7, temperature=1, seed=3),
        ]
        for body in bodies:
            options = {name: value for name, value in body.items() if name not in ("prompt", "max_tokens")}
            assert running.tokens(body) == [expected(directory, body["prompt"], body["max_tokens"], **options)]


@pytest.mark.parametrize(
    "command, family, flags, line",
    [
        ("generate", "experts", "--ep 3", "8 experts do not divide over 3 expert-parallel ranks (8 % 3 = 2)"),
        ("serve", "experts", "--ep 3", "8 experts do not divide over 3 expert-parallel ranks (8 % 3 = 2)"),
        ("generate", "mamba2", "--ep 2", "2 expert-parallel ranks: this mamba2 model has no experts"),
        ("serve", "mamba2", "--ep 2", "2 expert-parallel ranks: this mamba2 model has no experts"),
        ("generate", "experts", "--ep 0", "--ep 0 must be at least 1"),
        ("generate", "experts", "--ep 2 --cp 2", "--cp 2 and --ep 2: generate has one of them"),
        ("serve", "experts", "--ep 2 --draft x", "--draft x and --ep 2: the draft model is not divided over experts"),
    ],
)
def test_refusals(directory, capsys, monkeypatch, command, family, flags, line):
    """One line and exit code 2, before a rank is started."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(cli, "run_local_ranks", None)
    model = directory if family == "experts" else checkpoint(family)
    prompt = ["--prompt", "a"] if command == "generate" else []
    capsys.readouterr()  # what making the checkpoint has printed
    try:
        code = cli.main([command, "--model", str(model), *flags.split(), *prompt])
    except SystemExit as exit:
        code = exit.code
    assert code == 2 and re.fullmatch(rf"megatron-ssm( {command})?: {re.escape(line)}\n", capsys.readouterr().err)
