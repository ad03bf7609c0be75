"""`python -m megatron_ssm generate` in a process. Oracles: its documentation, transformers' generate, Python's UTF-8."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

import pytest
import torch
from programs import Fork, completed

from commfabric.foundation import command_line
from hf import edit_config, save_hf
from megatron_ssm import generate, load
from megatron_ssm.cli import commands
from megatron_ssm.cli import main as __main__
from megatron_ssm.engine.text import write_byte_tokenizer
from megatron_ssm.parallel.local_launch import GRACE_S, _wait
from megatron_ssm.train.options import parse_options
from serving import attempt

ROOT = Path(__file__).resolve().parents[3]
PROMPT = "naïve — 語\n"
HIDDEN, INNER, STATE, LAYERS, KERNEL = 32, 64, 8, 2, 4
NEW = 24
FIELDS = "text tokens prompt_tokens ttft_s tpot_s tokens_per_s tp reduce bytes_sent_per_token cache_bytes".split()
PYTHON = [sys.executable, "-m", "megatron_ssm", "generate"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *PYTHON[1:]]
LIMIT_S = 30  # three times the longest that the other ranks may run after one has died


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """A model of 300 ids with the byte tokenizer of 257; the 15th token of PROMPT's greedy continuation is its eos."""
    directory = tmp_path_factory.mktemp("checkpoint")
    model = save_hf(directory, "mamba2", vocab_size=300, num_hidden_layers=LAYERS)
    write_byte_tokenizer(directory)
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([list(PROMPT.encode())])
    whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW)
    tokens = whole[0, prompt.shape[1] :].tolist()
    (directory / "expected.json").write_text(json.dumps(tokens))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [298, tokens[14]]}))
    (directory / "prompt.txt").write_bytes(PROMPT.encode())
    return directory


def greedy_tokens(directory):
    """transformers' greedy tokens."""
    return json.loads((directory / "expected.json").read_text())


def text_of(tokens):
    """The text of tokens: bytes, or U+FFFD for ids that the tokenizer lacks."""
    return b"".join(bytes([t]) if t < 256 else "\ufffd".encode() for t in tokens).decode("utf-8", "replace")


@cache
def run(*arguments, launcher=tuple(PYTHON), prompt=PROMPT):
    """The completed process of a command line, which runs once per session."""
    prompt = [] if prompt is None else ["--prompt", prompt]
    command = [*launcher, *map(str, arguments), *prompt]
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)


def other_output(stderr):
    """Remove the line that names the kernels; asserts that there is exactly one."""
    text, lines = re.subn(rb"megatron-ssm: kernels .*\n", b"", stderr)
    assert lines == 1
    return text


def output_of(*arguments, **options):
    """The text or, with --json, the object that a run prints; asserts that it succeeds and prints nothing else."""
    result = run(*arguments, **options)
    assert (result.returncode, other_output(result.stderr)) == (0, b"")
    text = result.stdout.decode("utf-8")
    assert text.endswith("\n")
    return json.loads(text) if "--json" in arguments else text.removesuffix("\n")


def change_config(directory, **fields):
    """Change these fields of config.json."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))


def full_length(directory):
    """The arguments of a run that generates NEW tokens."""
    return "--model", directory, "--ignore-eos", "--max-new-tokens", NEW


def cache_bytes(tp, itemsize=4):
    """Bytes of the convolutions' histories (x, B and C of a rank, in the model's dtype) and of the fp32 states."""
    history = (KERNEL - 1) * (INNER // tp + 2 * STATE) * itemsize
    return LAYERS * (history + INNER // tp * STATE * 4)


# One text, however it is run


def test_text(directory):
    assert max(greedy_tokens(directory)) > 256  # an id that the tokenizer lacks
    result = completed(["generate", *full_length(directory), "--prompt", PROMPT])
    assert (result.returncode, other_output(result.stderr)) == (0, b"")
    assert result.stdout.decode("utf-8") == text_of(greedy_tokens(directory)) + "\n"


def test_two_local_ranks_print_the_same_text(directory, tmp_path):
    """As they are started by hand, with the console script, in a folder that a stranger has filled: no rank imports from it.

    Python imports from the folder of the script first.
    """
    (tmp_path / "folder").mkdir()
    for name in ("torch", "numpy", "safetensors", "json", "megatron_ssm"):
        (tmp_path / "folder" / f"{name}.py").write_text("raise SystemExit('from the current folder')")
    (tmp_path / "megatron-ssm").write_text("from megatron_ssm.cli.main import run_and_exit; run_and_exit()")
    command = [sys.executable, tmp_path / "megatron-ssm", "generate", *full_length(directory), "--prompt", PROMPT]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*map(str, command), "--tp", "2"], cwd=tmp_path / "folder", env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, timeout=120,
    )  # fmt: skip
    assert (result.returncode, other_output(result.stderr)) == (0, b"")
    assert result.stdout.decode("utf-8") == text_of(greedy_tokens(directory)) + "\n"


def test_tasks_of_srun_are_ranks(directory, tmp_path):
    """Slurm's variables alone say which they are; rank 0 prints."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    with open(tmp_path / "stderr", "wb") as stderr:
        for task in range(2):
            environment = {
                **os.environ, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1",
                "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "MASTER_PORT": str(port),
            }  # fmt: skip
            command = [*PYTHON, *full_length(directory), "--json", "--prompt", PROMPT]
            processes.append(Fork(command, env=environment, stdout=subprocess.PIPE, stderr=stderr))
    printed = [process.stdout.read() for process in processes]
    assert [process.wait(LIMIT_S) for process in processes] == [0, 0], (tmp_path / "stderr").read_text()
    for process in processes:
        process.stdout.close()
    report = json.loads(printed[0])
    assert (report["tp"], report["tokens"], printed[1]) == (2, greedy_tokens(directory), b"")


@pytest.mark.full
@pytest.mark.parametrize("flags", (("--cp", 2), pytest.param(("--tp", 2, "--cp", 2), marks=pytest.mark.full)), ids=str)
def test_local_ranks_that_share_the_prompt_generate_the_same_tokens(directory, flags):
    prompt = PROMPT * 9
    report = output_of(*full_length(directory), *flags, "--json", prompt=prompt)
    assert (report["cp"], report["prompt_tokens"]) == (2, len(prompt.encode()))
    assert report["tokens"] == output_of(*full_length(directory), "--json", prompt=prompt)["tokens"]


@pytest.mark.full
def test_torchrun_replicas_are_silent(directory, tmp_path):
    """Warnings about config.json, which every replica reads, are printed only once."""
    copy = shutil.copytree(directory, tmp_path / "copy")
    change_config(copy, colour="blue")
    result = run(*full_length(copy), "--tp", 1, "--json", launcher=tuple(TORCHRUN))
    assert (result.returncode, other_output(result.stderr)) == (0, b"config.json: ignored unknown field colour\n")
    report = json.loads(result.stdout)
    assert (report["tp"], report["bytes_sent_per_token"]) == (1, 0)
    assert report["text"] == output_of(*full_length(directory))


@pytest.mark.full
def test_json(directory):
    """The prompt is read from a file that is not ASCII."""
    prompt_file = directory / "prompt.txt"
    report = output_of(*full_length(directory), "--json", "--prompt-file", prompt_file, prompt=None)
    assert list(report) == FIELDS
    assert report["tokens"] == greedy_tokens(directory) and report["text"] == output_of(*full_length(directory))
    assert report["prompt_tokens"] == len(PROMPT.encode())
    assert (report["tp"], report["reduce"], report["bytes_sent_per_token"]) == (1, "fp32", 0)
    assert report["cache_bytes"] == cache_bytes(tp=1)
    assert report["ttft_s"] > 0 and report["tpot_s"] > 0
    assert report["tokens_per_s"] == pytest.approx(NEW / (report["ttft_s"] + (NEW - 1) * report["tpot_s"]))


@pytest.mark.full
def test_json_of_two_ranks_of_torchrun(directory):
    report = output_of(*full_length(directory), "--json", launcher=tuple(TORCHRUN))
    assert list(report) == FIELDS
    assert report["tokens"] == greedy_tokens(directory) and report["text"] == output_of(*full_length(directory))
    assert (report["tp"], report["cache_bytes"]) == (2, cache_bytes(tp=2))
    # The embedding; out_proj with the norm's sum of squares in each layer; the greedy choice.
    assert report["bytes_sent_per_token"] == 4 * (HIDDEN + LAYERS * (HIDDEN + 1) + 2)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ("bfloat16", "auto"))
def test_json_of_one_token_in_bfloat16(directory, tmp_path, dtype):
    """auto is what config.json names."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, dtype="bfloat16")
    report = output_of("--model", tmp_path, "--max-new-tokens", 1, "--dtype", dtype, "--json", "--local_rank=0")
    assert (len(report["tokens"]), report["tpot_s"]) == (1, None)
    assert report["cache_bytes"] == cache_bytes(tp=1, itemsize=2)


@pytest.mark.full
def test_the_end_of_text_token(directory):
    """It ends the tokens but is not part of the text."""
    report = output_of("--model", directory, "--max-new-tokens", NEW, "--json")
    tokens = greedy_tokens(directory)
    end = min(tokens.index(t) for t in (tokens[14], 298) if t in tokens)
    assert 5 < end and report["tokens"] == tokens[: end + 1]
    assert report["text"] == text_of(tokens[:end])


@pytest.mark.full
def test_stop_string(directory):
    text = text_of(greedy_tokens(directory))
    stop = text[6:8]
    assert output_of(*full_length(directory), "--stop", "never", "--stop", stop) == text[: text.index(stop)]


@pytest.mark.full
def test_sampling_flags(directory):
    options = dict(temperature=1.5, top_k=90, top_p=0.9, repetition_penalty=1.3, seed=4)
    flags = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), value)]
    prompt = torch.tensor([list(PROMPT.encode())])
    tokens = generate(load(directory), prompt, max_new_tokens=NEW, **options)[0].tolist()
    assert output_of(*full_length(directory), *flags, "--json")["tokens"] == tokens


# Errors: exit code 2 and one line


def assert_one_line(result, pattern):
    """Exit code 2, nothing on stdout, one line on stderr."""
    message = result.stderr.decode("utf-8")
    assert (result.returncode, result.stdout, message.count("\n")) == (2, b"", 1), message
    assert re.fullmatch(rf"megatron-ssm( generate)?: {pattern}\n", message), message


@pytest.mark.parametrize(
    "flags,pattern",
    [
        (["--model", "DIR", "--max-new", "3"], r"unknown argument --max-new \(did you mean --max-new-tokens\?\)"),
        (["--model", "DIR", "--modell=x"], r"unknown argument --modell=x \(did you mean --model\?\)"),
        ([], "generate needs the directory of one model: generate DIR"),
        (["--model", "DIR", "--prompt-file", "F"], "argument .*--prompt.*: not allowed with argument --prompt.*"),
        (["--model", "DIR", "--max-new-tokens", "many"], "argument --max-new-tokens: invalid int value: 'many'"),
        (["--model", "DIR", "--dtype", "float8"], "argument --dtype: invalid choice: 'float8' .*"),
        (["--model", "DIR", "--tp", "0"], "--tp 0 must be at least 1"),
        (["--model", "DIR", "--cp", "-1"], "--cp -1 must be at least 1"),
    ],
)
def test_errors_of_flags(flags, pattern):
    assert_one_line(run(*flags), pattern)


@pytest.mark.parametrize(
    "command,line",
    [
        ("megatron-ssm generate --modl x --prompt y", "unknown argument --modl (did you mean --model?)"),
        ("megatron-ssm generate --model x --promt=y", "unknown argument --promt=y (did you mean --prompt?)"),
        ("megatron-ssm advise --model x --fabric y --json yes", "unknown argument yes: --json takes no value"),
        ("megatron-ssm --modl x generate", "unknown argument --modl (did you mean --model?)"),
        (
            "megatron-ssm genrate --modl x",
            "unknown command genrate (did you mean generate?): expected one of generate, .*",
        ),
        ("megatron-ssm generate --model x -- --promt", "one of the arguments --prompt --prompt-file is required"),
        ("pretrain.py --dat x --out y", "unknown argument --dat (did you mean --data?)"),
    ],
)
def test_a_misspelt_flag_is_reported_before_a_missing_one(capsys, command, line):
    program, *words = command.split()
    with pytest.raises(SystemExit, match="2"):
        parse_options(words) if program == "pretrain.py" else __main__.parser().parse_args(words)
    prefix, message = capsys.readouterr().err.split(": ", 1)
    assert command.startswith(prefix) and re.fullmatch(re.escape(line).replace(r"\.\*", ".*") + "\n", message)


@pytest.mark.parametrize("text", [["--prompt=--modl"], ["--prompt", "--modl x"]])
def test_values_that_look_like_flags_after_the_deepspeed_launchers_own(text):
    given = __main__.parser().parse_args(["--local_rank=1", "generate", "--model", "x", *text])
    assert (given.command, given.prompt) == ("generate", text[-1].removeprefix("--prompt="))


@pytest.mark.parametrize(
    "flags,pattern",
    [
        (["--tp", 3], r"8 heads do not divide over 3 tensor-parallel ranks \(8 % 3 = 2\)"),
        (["--temperature", "nan"], "temperature=nan must be at least 0 and finite"),
        pytest.param(["--temperature", 1, "--top-p", 1.5], "top_p=1.5 must be .*", marks=pytest.mark.full),
        pytest.param(["--temperature", -1], "temperature=-1.0 must be .*", marks=pytest.mark.full),
        pytest.param(["--top-k", 0], "top_k=0 must be .*", marks=pytest.mark.full),
        pytest.param(["--max-new-tokens", 0], "max_new_tokens=0 must be .*", marks=pytest.mark.full),
        pytest.param(["--repetition-penalty", 0], "repetition_penalty=0.0 must be .*", marks=pytest.mark.full),
        pytest.param(["--temperature", 1, "--seed", 2**64], f"seed={2**64} .* 64 bits", marks=pytest.mark.full),
        pytest.param(["--stop", ""], "a stop string is empty.*", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_errors_of_values(directory, flags, pattern):
    assert_one_line(completed(["generate", "--model", directory, *flags, "--prompt", PROMPT]), pattern)


def test_local_ranks_are_not_started_for_a_model_they_cannot_share(directory, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(__main__, "run_local_ranks", None)
    for model, pattern in ((directory, r"8 heads do not divide over 16 .*"), ("none", "none does not exist")):
        assert __main__.main(["generate", "--model", str(model), "--prompt", "a", "--tp", "16"]) == 2
        assert re.fullmatch(f"megatron-ssm generate: {pattern}\n", capsys.readouterr().err)


def errors_of_ranks(ranks, world, monkeypatch, flags_of):
    """The error of `generate` on each rank of a launcher; flags_of(rank) are its flags."""
    monkeypatch.setenv("WORLD_SIZE", str(world))

    def run(rank):
        given = __main__.parser().parse_args(["generate", *map(str, flags_of(rank))])
        return attempt(commands.generate, given)

    return ranks(run, world, timeout=30)


@pytest.mark.parametrize("world", (3, pytest.param(5, marks=pytest.mark.full)))
def test_a_launchers_ranks_find_that_they_cannot_share_the_model(ranks, world, directory, monkeypatch):
    errors = errors_of_ranks(ranks, world, monkeypatch, lambda rank: ["--model", directory, "--prompt", "a"])
    words = f"8 heads do not divide over {world} tensor-parallel ranks (8 % {world} = {8 % world})"
    assert errors == [("ValueError", words)] * world


REMOVED_ON_ONE_RANK = {  # {file: words of the error}
    "config.json": "config.json does not exist",
    "tokenizer.json": "tokenizer.json does not exist",
    "model.safetensors": "holds neither model.safetensors nor",
    "prompt": "No such file or directory",
}


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("file", REMOVED_ON_ONE_RANK)
def test_a_file_that_one_rank_cannot_read(ranks, world, file, directory, tmp_path, monkeypatch):
    """All ranks raise the error, because only rank 0 prints it."""
    shutil.copytree(directory, tmp_path / "harmed")
    (tmp_path / "harmed" / "prompt").write_text("a")
    shutil.copytree(tmp_path / "harmed", tmp_path / "good")
    (tmp_path / "harmed" / file).unlink()

    def flags(rank):
        model = tmp_path / ("harmed" if rank == world - 1 else "good")
        return ["--model", model, "--prompt-file", model / "prompt", "--max-new-tokens", 2]

    first, *others = errors_of_ranks(ranks, world, monkeypatch, flags)
    assert first is not None and first[0] == "FileNotFoundError" and REMOVED_ON_ONE_RANK[file] in first[1], first
    assert first[1].endswith(f"(rank {world - 1})") and all(other == first for other in others)


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
def test_ranks_with_different_prompts(ranks, world, directory, monkeypatch):
    errors = errors_of_ranks(ranks, world, monkeypatch, lambda rank: ["--model", directory, "--prompt", "ab"[rank % 2]])
    assert all(error is not None and error[0] == "ValueError" and error == errors[0] for error in errors)


def test_ranks_wait_for_rank_0_to_print_under_any_launcher(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(command_line.time, "sleep", waited.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        command_line.print_on_rank_0(f"rank {rank}")
    assert (capsys.readouterr().err, waited) == ("rank 0\n", [command_line.RANK_0_GRACE_S])


def without_tokenizer(directory):
    (directory / "tokenizer.json").unlink()


def truncated(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def smaller_than_its_tokenizer(directory):
    change_config(directory, vocab_size=256)


@pytest.mark.parametrize(
    "harm,pattern",
    [
        pytest.param(without_tokenizer, r".*/harmed/tokenizer\.json does not exist", marks=pytest.mark.full),
        (truncated, r".*/harmed/model\.safetensors is not a complete safetensors file: .*"),
        pytest.param(
            smaller_than_its_tokenizer,
            "the tokenizer is larger than the model: id 256, vocab_size 256",
            marks=pytest.mark.full,
        ),
    ],
)
def test_errors_of_checkpoints(directory, tmp_path, harm, pattern):
    harm(shutil.copytree(directory, tmp_path / "harmed"))
    assert_one_line(completed(["generate", "--model", tmp_path / "harmed", "--prompt", PROMPT]), pattern)


def test_an_id_of_the_hub_suggests_a_download():
    for model, name in (("some/model-130m", "model-130m"), ("Qwen/Qwen3.5-0.8B", "Qwen3.5-0.8B")):
        pattern = rf"{model} is not a directory; to fetch it: hf download {model} --local-dir {name}"
        assert_one_line(completed(["generate", "--model", model, "--prompt", "a", "--tp", 2]), pattern)


def test_other_paths_that_are_no_directory(directory, tmp_path, monkeypatch, capsys):
    """Every command says what to give instead; a download only for what may be an id of the Hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    (tmp_path / "out").mkdir()
    gguf = "GGUF files cannot be read yet; give a Hugging Face directory with safetensors"
    expected = {
        f"{directory}/config.json": f"{directory}/config.json is a file; give its directory, {directory}",
        "model.gguf": f"model.gguf: {gguf}",
        "TheBloke/model.gguf": f"TheBloke/model.gguf: {gguf}",
    }
    for missing in "/some/model ./some/model ../model ~/model a/b/c model out/model a/config.json".split():
        expected[missing] = f"{missing} does not exist"
    for model, line in expected.items():
        for command in ("generate --prompt a --model", "chat", "serve --model", "convert --dry-run --model"):
            assert __main__.main([*command.split(), model]) == 2
            assert capsys.readouterr().err == f"megatron-ssm {command.split()[0]}: {line}\n"
        with pytest.raises((ValueError, FileNotFoundError), match=re.escape(line)):
            load(model)


@pytest.mark.parametrize(
    "flags, prompt, pattern",
    [
        (["--prompt-file", "latin-1"], None, r".*/latin-1 is not UTF-8 \(byte 2\)"),
        pytest.param([], b"na\xefve", r"--prompt is not UTF-8 \(byte 2\)", marks=pytest.mark.full),
        pytest.param([], "", "the prompt is empty", marks=pytest.mark.full),
    ],
)
def test_errors_of_prompts(directory, tmp_path, flags, prompt, pattern):
    (tmp_path / "latin-1").write_bytes("naïve".encode("latin-1"))
    flags = [tmp_path / flag if flag == "latin-1" else flag for flag in flags]
    flags += [] if prompt is None else ["--prompt", os.fsdecode(prompt)]
    assert_one_line(completed(["generate", "--model", directory, *flags]), pattern)


NO_TORCH = """
import runpy, sys
for line in ("--help", "generate --help", "generate --modle x --prompt x", "generate --model x --prompt x --tp 0", "x"):
    sys.argv = ["megatron_ssm", *line.split()]
    try:
        runpy.run_module("megatron_ssm", run_name="__main__")
    except SystemExit as end:
        print(end.code, *{"torch", "numpy", "tokenizers", "transformers"} & set(sys.modules), file=sys.stderr)
"""


def test_a_model_loads_no_compiler():
    """torch._dynamo takes as long to import as all of torch."""
    modules = "megatron_ssm.engine.generation, sparsefusion.fusion.sparse_fusion"
    line = f"import sys, {modules}; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", line], cwd=ROOT, timeout=60).returncode == 0


def test_help_and_errors_of_flags_load_no_torch():
    result = subprocess.run([sys.executable, "-c", NO_TORCH], cwd=ROOT, capture_output=True, text=True, timeout=60)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("megatron-ssm")]
    assert lines == ["0", "0", "2", "2", "2"]
    for flag in ("generate", "--model", "--prompt-file", "--max-new-tokens", "--top-p", "--tp", "--json"):
        assert flag in result.stdout
    assert "rendezvous" not in result.stdout and "local" not in result.stdout


# Closed pipes, Ctrl-C, and ranks that die


@pytest.mark.full
@pytest.mark.parametrize("tp", (1, pytest.param(2, marks=pytest.mark.full)))
def test_a_closed_stdout_pipe_is_not_an_error(directory, tp):
    reader, writer = os.pipe()
    os.close(reader)  # every write fails
    command = [*PYTHON, *map(str, full_length(directory)), "--prompt", "a", "--tp", str(tp)]
    result = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, timeout=LIMIT_S)
    os.close(writer)
    assert (result.returncode, other_output(result.stderr)) == (0, b"")


@pytest.mark.full
def test_a_stdout_pipe_that_is_closed_after_one_byte(directory):
    command = [*PYTHON, *map(str, full_length(directory)), "--prompt", "a"]
    script = '"$@" | head -c 1; exit "${PIPESTATUS[0]}"'
    result = subprocess.run(["bash", "-c", script, "-", *command], cwd=ROOT, capture_output=True, timeout=LIMIT_S)
    assert (result.returncode, len(result.stdout), other_output(result.stderr)) == (0, 1, b"")


def test_a_printer_on_a_closed_pipe_is_disabled(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        printer = command_line.Printer(True)
        printer.print("a")
        assert not printer.is_enabled
        command_line.Printer(True).print("b")  # is discarded, like the rest of the buffer
        monkeypatch.undo()


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_under_stdout(monkeypatch, capsys):
    """The command ends with one line. Nothing is left that Python would try to write when it ends."""
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert command_line.run("doctor", lambda: command_line.Printer(True).print("text")) == 1
        command_line.Printer(True).print("more")
    assert capsys.readouterr().err == "doctor: rank 0 cannot write: No space left on device\n"


def test_a_closed_stdout_is_not_an_error(directory):
    command = [*PYTHON, *map(str, full_length(directory)), "--prompt", "a"]
    result = subprocess.run(
        ["bash", "-c", '"$@" >&-', "-", *command], cwd=ROOT, stderr=subprocess.PIPE, timeout=LIMIT_S
    )
    assert (result.returncode, other_output(result.stderr)) == (0, b"")


@contextmanager
def generating(directory, tp):
    """A process that leads its own group, has printed its first byte and will generate a million tokens."""
    flags = ["--model", directory, "--prompt", "a", "--ignore-eos", "--max-new-tokens", 10**6, "--tp", tp]
    with TemporaryFile() as stderr:
        process = Fork([*PYTHON, *flags], start_new_session=True, stdout=subprocess.PIPE, stderr=stderr)
        try:
            assert process.stdout.read(1)
            yield process, stderr
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            process.wait()
            process.stdout.close()


def wait_for_all(process, stderr):
    """Wait until all processes of the group have ended; returns what they printed to stderr."""
    process.stdout.read()  # returns when the last process closes stdout
    process.wait(LIMIT_S)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    stderr.seek(0)
    return other_output(stderr.read()).decode("utf-8")


@pytest.mark.parametrize(
    "tp,send",
    [
        pytest.param(1, os.kill, marks=pytest.mark.full),
        (2, os.kill),
        pytest.param(2, os.killpg, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_control_c(directory, tp, send):
    with generating(directory, tp) as (process, stderr):
        send(process.pid, signal.SIGINT)
        assert wait_for_all(process, stderr) == ""
        assert process.returncode == 130


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_killed_rank_ends_the_others(directory, rank):
    with generating(directory, tp=2) as (process, stderr):
        os.kill(process.ranks()[rank], signal.SIGKILL)
        message = wait_for_all(process, stderr)
        assert process.returncode == 1
        assert message.endswith(f"megatron-ssm: rank {rank} of 2 was killed by SIGKILL\n")


def test_the_killed_rank_is_blamed_not_those_that_fail_with_it(capfd):
    ends = ("raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)")
    processes = [subprocess.Popen([sys.executable, "-c", end]) for end in ends]
    for process in processes:
        process.wait()
    assert _wait(processes) == 1
    assert capfd.readouterr().err == "megatron-ssm: rank 1 of 2 was killed by SIGKILL\n"


def test_ranks_that_wait_for_rank_0_are_ended_after_it():
    ends = ("raise SystemExit(2)", "import threading; threading.Event().wait()")
    processes = [subprocess.Popen([sys.executable, "-c", end]) for end in ends]
    start = time.monotonic()
    assert _wait(processes) == 2
    assert time.monotonic() - start < GRACE_S
    processes[1].kill()
    processes[1].wait()
