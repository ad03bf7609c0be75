"""`megatron-ssm chat` and `generate --chat` in processes. Oracle: transformers' greedy tokens after its template's text."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import tempfile

import pytest
import torch
from programs import PYTHON, Fork, completed
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from hf import edit_config, save_hf
from megatron_ssm import generate, load

BELL = "ć"  # the byte-level vocabulary's character for the byte 7, which a terminal would sound
ALPHABET = "abcdefghijklmnopqrstuvwxyz<>:;.,-+" + "Ġ" + "Ċ" + BELL
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NEW = 12
LIMIT_S = 60
CHAT = ["--temperature", "0", "--max-new-tokens", str(NEW)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A hybrid model in float32 with a tokenizer of single characters, a chat template, and settings of sampling."""
    directory = tmp_path_factory.mktemp("chat")
    save_hf(directory, "granitemoehybrid", vocab_size=len(ALPHABET) + 1)
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": len(ALPHABET), "do_sample": True, "temperature": 0.7, "top_k": 5})
    )
    return directory


@pytest.fixture(scope="module")
def oracle(directory):
    """A function: messages -> transformers' greedy reply."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)

    def reply(*messages, new=NEW):
        roles = ("system", "user") if messages[0].startswith("system ") else ("user",)
        roles += ("assistant", "user") * len(messages)
        texts = [
            dict(role=role, content=text.removeprefix("system ")) for role, text in zip(roles, messages, strict=False)
        ]
        ids = tokenizer.apply_chat_template(texts, add_generation_prompt=True, return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    return reply


def copy(directory, target):
    """Copy the files of a directory."""
    for file in directory.iterdir():
        shutil.copy(file, target)


def printed(*replies):
    """What stdout has after these replies: each on a line of its own, without control characters."""
    return "".join(reply.replace("\a", "") + "\n" for reply in replies)


def chat(directory, *lines, flags=CHAT, code=0):
    """(stdout, stderr) of a conversation whose messages come from a file."""
    result = completed(["chat", directory, *flags], stdin="".join(line + "\n" for line in lines).encode())
    assert result.returncode == code, result.stderr.decode()
    return result.stdout.decode(), result.stderr.decode()


@pytest.mark.parametrize("ranks", [[], ["--tp", "2"]], ids=["one rank", "two ranks"])
def test_replies_follow_from_the_conversation(directory, oracle, ranks):
    first = oracle("what is a bell")
    second = oracle("what is a bell", first, "and then")
    anew = oracle("system be brief", "what is a bell")
    lines = [
        "what is a bell",
        "and then",
        "/reset",
        "what is a bell",
        "/system be brief",
        "what is a bell",
        "",
        "/what",
    ]
    out, notes = chat(directory, *lines, "/exit", "never read", flags=[*CHAT, *ranks])
    assert out == printed(first, second, first, anew)
    assert notes.count("tokens/s") == 4 and notes.count("/reset: ") == 1  # which a wrong command prints


def test_sampling_is_that_of_the_generation_config(directory):
    """As `generate` samples with these options; an option of the command line replaces the file's."""
    model, tokenizer = load(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompt = torch.tensor([tokenizer.encode("<user>tell me;<assistant>").ids])

    def sampled(**options):
        tokens = generate(model, prompt, max_new_tokens=NEW, seed=3, stop_tokens=len(ALPHABET), **options)
        return printed(tokenizer.decode(tokens[0].tolist()))

    flags = ["--max-new-tokens", str(NEW), "--seed", "3"]
    assert chat(directory, "tell me", flags=flags)[0] == sampled(temperature=0.7, top_k=5)
    assert chat(directory, "tell me", flags=[*flags, "--temperature", "1.5"])[0] == sampled(temperature=1.5, top_k=5)


def test_a_full_context_drops_the_oldest_messages(directory, oracle):
    """With 100 tokens, a prompt may have 75: the third has 71 or less, the fourth too many, so that 50 may stay."""
    flags = [*CHAT[:2], "--max-new-tokens", "6", "--max-length", "100"]
    first = oracle("a", new=6)
    second = oracle("a", first, "b", new=6)
    third = oracle("a", first, "b", second, "c", new=6)
    fourth = oracle("c", third, "d", new=6)
    out, notes = chat(directory, "a", "b", "c", "d", flags=flags)
    assert out == printed(first, second, third, fourth)
    assert notes.count("is full: the oldest messages (2) and their replies were dropped") == 1
    out, notes = chat(directory, "a", "a" * 100, "b", flags=flags)  # what cannot fit leaves the conversation as it was
    assert out == printed(first, second) and notes.count("error: the prompt has") == 1


def test_ctrl_c_stops_a_reply_and_the_conversation_goes_on(directory, tmp_path):
    """The model has no token that ends a text."""
    copy(directory, tmp_path)
    edit_config(tmp_path, eos_token_id=None)
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as stderr:
        process = Fork(
            [*PYTHON, "chat", tmp_path, "--max-length", "1000000", "--tp", "2"], stdin=reader,
            stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
        )  # fmt: skip
        os.close(reader)
        try:
            os.write(writer, b"count\n")
            process.stdout.read(1)  # the reply has begun
            process.send_signal(signal.SIGINT)
            os.write(writer, b"/system s\n/exit\n")
            os.close(writer)
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()
        stderr.seek(0)
        assert b", stopped]" in stderr.read()


def test_a_terminal_gets_a_prompt_and_dim_reasoning(directory, tmp_path):
    """The template begins the reasoning, and the budget of tokens ends before </think>, so that all is reasoning."""
    copy(directory, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE + "<think>{# </think> #}")
    parent, child = pty.openpty()
    process = Fork(
        [*PYTHON, "chat", tmp_path, *CHAT], stdin=child, stdout=child, stderr=child, start_new_session=True
    )  # fmt: skip
    try:
        os.write(parent, b"hello\n")
        shown = b""
        while not re.search(rb" tokens.*> ", shown, re.DOTALL):  # before the next prompt, Ctrl-D would not be an end
            shown += os.read(parent, 1000)
        os.write(parent, b"\x04")  # Ctrl-D
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        os.close(parent)
        os.close(child)
    assert b"\x1b[2m" in shown


def test_what_cannot_chat_is_an_error(directory, tmp_path):
    for flags, message in (
        (["--temperature", "3"], "temperature=3.0"),
        (["--max-new-tokens", "60", "--max-length", "64"], "a reply may have at most 48"),
    ):
        _, stderr = chat(directory, "hi", flags=flags, code=2)
        assert stderr.count("\n") == 1 and message in stderr
    copy(directory, tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    chat(tmp_path, "hi", flags=[*CHAT, "--chat-template", directory / "chat_template.jinja"])
    _, stderr = chat(tmp_path, "hi", code=2)
    assert stderr.count("\n") == 1 and "has no chat template" in stderr and "megatron-ssm generate" in stderr


def test_generate_applies_the_template_or_says_that_there_is_one(directory, oracle):
    flags = ["generate", "--model", directory, "--max-new-tokens", str(NEW)]
    applied = completed([*flags, "--chat", "--prompt-file", "-", "--tp", "2"], stdin=b"what is a bell")
    assert (applied.returncode, applied.stdout.decode()) == (0, oracle("what is a bell") + "\n")
    plain = completed([*flags, "--prompt", "what"])
    assert b"--chat applies it" in plain.stderr and b"suggests --temperature 0.7 --top-k 5" in plain.stderr
    assert b"--chat" not in applied.stderr and b"; float32, " in plain.stderr


def test_a_text_is_a_prompt(directory, oracle):
    model = load(directory)
    text = generate(model, "<user>what is a bell;<assistant>", max_new_tokens=NEW)
    assert text == oracle("what is a bell")
    cut = generate(model, "<user>what is a bell;<assistant>", max_new_tokens=NEW, stop_strings=text[3])
    assert cut == text[: text.index(text[3])]
    model.directory = None
    with pytest.raises(ValueError, match="needs the tokenizer.json"):
        generate(model, "a")
