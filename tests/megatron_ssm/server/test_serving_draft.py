"""A server with a draft model. Oracle: `generate` for each request alone, without one."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf import hf_model, save_hf
from megatron_ssm.cli import main as cli
from megatron_ssm.engine.text import write_byte_tokenizer
from megatron_ssm.server.command import serve
from servers import expected, server
from serving import VOCAB

LAYERS = 12  # so many that proposals of a draft with one layer are worth their time
ASKED = [
    dict(prompt="a" * 150, max_tokens=40, temperature=0),
    dict(prompt="Some text", max_tokens=40, temperature=0.8, seed=1),
    dict(prompt="Another text, of another length", max_tokens=30, temperature=1.2, top_p=0.8, top_k=50, seed=2),
]


@pytest.fixture(scope="module")
def model_and_draft(tmp_path_factory):
    """The directories of two models with equal logits: the layers of the model that the draft lacks add nothing."""
    directory, draft = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("draft")
    small = save_hf(draft, "mamba2", num_hidden_layers=1, vocab_size=VOCAB)
    large = hf_model("mamba2", num_hidden_layers=LAYERS, vocab_size=VOCAB)
    with torch.no_grad():
        for layer in large.backbone.layers:
            layer.mixer.out_proj.weight.zero_()
    large.load_state_dict(small.state_dict(), strict=False)
    large.save_pretrained(directory)
    write_byte_tokenizer(directory)
    return directory, draft


@pytest.mark.parametrize("tp", (pytest.param(1, marks=pytest.mark.full), 2))
def test_replies_have_the_same_tokens_as_without(model_and_draft, tmp_path, tp):
    """One request alone, and three together; prompts are longer than what a step reads."""
    directory, draft = model_and_draft
    flags = ["--draft", draft, "--slots", 4, "--token-budget", 40, "--max-length", 300]
    with server(directory, tmp_path / "log", *flags, tp=tp) as running:
        alone = running.tokens(ASKED[0])
        proposed, accepted = (running.metric(f"{name}_tokens_total") for name in ("proposed", "accepted"))
        with ThreadPoolExecutor(len(ASKED)) as pool:
            together = list(pool.map(running.tokens, ASKED))
        assert running.metric("proposed_tokens_total") >= proposed >= accepted > 20
        assert running.metric("new_tokens_total") == 40 + 110
    for body, (tokens,) in zip([ASKED[0], *ASKED], [alone, *together], strict=True):
        options = {name: value for name, value in body.items() if name not in ("prompt", "max_tokens")}
        assert tokens == expected(directory, body["prompt"], body["max_tokens"], **options)


def refusal(model, draft):
    """The error of a server that does not start."""
    flags = ["serve", "--model", str(model), "--device", "cpu", "--port", "0", "--draft", str(draft)]
    with pytest.raises((ValueError, OSError)) as refused:
        serve(cli.parser().parse_args(flags))
    return str(refused.value)


def test_drafts_that_are_refused(model_and_draft, tmp_path, monkeypatch):
    """Before a model is loaded."""
    directory, draft = model_and_draft
    monkeypatch.setattr("megatron_ssm.server.command.load", lambda *given, **options: pytest.fail("it was loaded"))
    assert f"{tmp_path / 'missing'} does not exist" in refusal(directory, tmp_path / "missing")
    other = tmp_path / "other"
    save_hf(other, "mamba", num_hidden_layers=1, vocab_size=VOCAB + 1)
    message = "the draft model has a vocabulary of 258, the model one of 257: they must be equal"
    assert refusal(directory, other) == message
    shutil.copytree(draft, tmp_path / "tokens")
    vocabulary = json.loads((directory / "tokenizer.json").read_text())
    vocabulary["added_tokens"][0]["content"] = "<|other|>"
    (tmp_path / "tokens" / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert "its tokenizer has other tokens than the model's: they must be equal" in refusal(
        directory, tmp_path / "tokens"
    )


@pytest.mark.parametrize("tp", ("1", "2"))
def test_a_draft_that_is_missing_is_one_line(model_and_draft, tmp_path, tp, capfd, monkeypatch):
    monkeypatch.setattr(cli, "leave_on_interrupt", lambda: None)  # it would stay for the tests that follow
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    missing = str(tmp_path / "missing")
    flags = ["--model", str(model_and_draft[0]), "--draft", missing, "--device", "cpu", "--tp", tp, "--port", "0"]
    assert cli.main(["serve", *flags]) == 2
    error = capfd.readouterr().err
    assert f"{missing} does not exist" in error and error.count("\n") == 1
