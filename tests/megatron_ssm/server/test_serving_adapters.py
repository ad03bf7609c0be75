"""A server with LoRA adapters, and the other commands. Oracle: transformers' greedy tokens with PEFT."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from adapters import adapters, greedy_tokens
from programs import completed

import megatron_ssm
from megatron_ssm.checkpoints.convert import convert
from megatron_ssm.cli import main as cli
from servers import server, text_of, with_template
from serving import checkpoint

FAMILY, PROMPT, NEW = "qwen3_5_text", "Some text", 8
IDS = list(PROMPT.encode())


@pytest.fixture(scope="module")
def lora():
    """--lora NAME=DIR for the adapters a and b."""
    return [f"--lora=adapter-{name}={adapters(FAMILY, name)}" for name in "ab"]


def body(name, **options):
    return {"model": name, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, **options}


@pytest.mark.parametrize("tp", (pytest.param(1, marks=pytest.mark.full), 2))
def test_requests_choose_adapters_by_the_name_of_the_model(lora, tmp_path, tp):
    base = with_template(FAMILY)
    flags = ["--slots", 4, "--max-length", 100, "--speculate", 3, "--dtype", "float32", *lora]
    with server(base, tmp_path / "log", *flags, tp=tp) as running:
        names = {FAMILY: "", "adapter-a": "a", "adapter-b": "b"}
        asked = [*names, *names]
        with ThreadPoolExecutor(len(asked)) as pool:
            replies = list(pool.map(running.tokens, map(body, asked)))
        assert replies == [[greedy_tokens(FAMILY, names[name], IDS, NEW)] for name in asked]
        assert len({str(reply) for reply in replies}) == 3

        def cached(name, prompt):
            reply = running.post("/v1/completions", body(name, prompt=prompt)).json()
            assert reply["model"] == name
            return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

        fresh = "A prompt that no adapter has read"
        assert [cached(name, fresh) for name in asked] == [0] * 3 + [len(fresh)] * 3

        embeddings = [running.post("/v1/embeddings", {"model": name, "input": PROMPT}).json() for name in names]
        assert len({str(each["data"]) for each in embeddings}) == 3
        listed = running.client().get("/v1/models").json()["data"]
        assert [(card["id"], card["root"], card["parent"]) for card in listed] == [
            (FAMILY, FAMILY, None),
            ("adapter-a", f"{FAMILY}-a", FAMILY),
            ("adapter-b", f"{FAMILY}-b", FAMILY),
        ]
        assert running.client().get("/v1/models/adapter-b").json() == listed[2]
        for reply in (running.client().get("/v1/models/c"), running.post("/v1/completions", body("c"))):
            assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
            assert f"there is no model 'c' here, only '{FAMILY}', 'adapter-a', 'adapter-b'" in reply.text


def test_generate_and_chat():
    directory = with_template(FAMILY)

    def output(command, *flags, stdin=b""):
        flags = [command, *flags, "--lora", adapters(FAMILY, "a"), "--dtype", "float32", "--device", "cpu"]
        result = completed(list(map(str, flags)), stdin=stdin)
        assert result.returncode == 0, result.stderr
        return result.stdout.decode()

    flags = ["--model", directory, "--prompt", PROMPT, "--max-new-tokens", NEW, "--ignore-eos", "--json", "--tp", 2]
    assert json.loads(output("generate", *flags))["tokens"] == greedy_tokens(FAMILY, "a", IDS, NEW)
    reply = greedy_tokens(FAMILY, "a", [256, *b"[user]Hi[assistant]"], NEW)
    flags = ["--temperature", 0, "--max-new-tokens", NEW]
    assert output("chat", directory, *flags, stdin=b"Hi\n") == text_of(reply) + "\n"


def test_convert_writes_the_merged_model(tmp_path):
    """With the tokenizer, in the files' dtype."""
    source = checkpoint("mamba2")
    rows = convert(source, tmp_path / "merged", lora=adapters("mamba2", "a"))
    assert len(rows) == len(convert(source, weights="bfloat16")) and (tmp_path / "merged" / "tokenizer.json").exists()
    model = megatron_ssm.load(tmp_path / "merged")
    found = megatron_ssm.generate(model, torch.tensor([IDS]), max_new_tokens=NEW)[0].tolist()
    assert found == greedy_tokens("mamba2", "a", IDS, NEW)


REFUSED = {
    "--lora and --weights int8: LoRA adapters need a model that is not quantized": [
        "--lora",
        "a={a}",
        "--weights",
        "int8",
    ],
    "expected NAME=DIR": ["--lora", "a"],
    "a has been given before": ["--lora", "a={a}", "--lora", "a={a}"],
    "the model itself has this name": ["--lora", "mamba2={a}"],
    "missing/adapter_config.json": ["--lora", "a=missing"],
    "is not for a linear layer of this mamba2 model": ["--lora", "a={other}"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message, capfd, monkeypatch):
    """In one line, before the weights are read."""
    monkeypatch.setattr("megatron_ssm.server.command.load", lambda *given, **options: pytest.fail("it was loaded"))
    check_refused(checkpoint("mamba2"), REFUSED[message], message, capfd, monkeypatch)


def test_a_quantized_directory_is_refused(tmp_path, capfd, monkeypatch):
    megatron_ssm.save(wide := megatron_ssm.load(checkpoint("mamba2")), tmp_path / "wide")
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "megatron_ssm", "weights": "int8", "block_size": 64}
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    (tmp_path / "wide" / "tokenizer.json").write_bytes((wide.directory / "tokenizer.json").read_bytes())
    message = "LoRA adapters need a model that is not quantized; its matrices are in int8"
    check_refused(tmp_path / "wide", ["--lora", "a={a}"], message, capfd, monkeypatch)


def check_refused(directory, flags, message, capfd, monkeypatch):
    monkeypatch.setattr(cli, "leave_on_interrupt", lambda: None)  # it would stay for the tests that follow
    flags = [flag.format(a=adapters("mamba2", "a"), other=adapters(FAMILY, "a")) for flag in flags]
    capfd.readouterr()
    try:
        code = cli.main(["serve", "--model", str(directory), "--device", "cpu", "--port", "0", *flags])
    except SystemExit as ended:
        code = ended.code
    error = capfd.readouterr().err
    assert code == 2 and message in error and error.strip().count("\n") == 0, error
