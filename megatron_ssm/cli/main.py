"""The command line `python -m megatron_ssm COMMAND`, also installed as `megatron-ssm`: its flags and exit codes.

Flags are checked before torch is imported.
"""

import argparse
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import NoReturn

from commfabric import FORMATS
from commfabric.foundation.command_line import (
    LIMIT,
    Parser,
    check_number,
    leave_on_interrupt,
    print_error,
    run,
    silence_third_parties,
)
from commfabric.foundation.launcher import adopt_launcher, this_rank
from commfabric.foundation.lazy import version
from megatron_ssm.parallel.local_launch import accept_passed_interrupts, run_local_ranks
from megatron_ssm.server.log_lines import FORMATS as LOG_FORMATS
from megatron_ssm.server.log_lines import LEVELS, configure_log
from megatron_ssm.server.tool_calls import PARSERS

WEIGHTS = ("fp32", "bf16", "int8", "int4")  # of bench
# Of bench --against: the module, and the package to install
PEERS = {"transformers": ("transformers", "transformers"), "llama.cpp": ("llama_cpp", "llama-cpp-python")}
EP_HELP = "expert-parallel ranks, which split the experts only (default: 1)"
TEMPLATE_HELP = "a template in Jinja in place of the checkpoint's"
LORA_HELP = "LoRA adapters of the model, as PEFT writes them"
# {command: the command lines that end its --help}
EXAMPLES = {
    "main": ["megatron-ssm chat DIR", "megatron-ssm serve --model DIR"],
    "generate": ['megatron-ssm generate --model DIR --prompt "The sea" --temperature 0.7 --tp 2'],
    "chat": ["megatron-ssm chat DIR", 'megatron-ssm chat DIR --system "Answer in French." --temperature 0'],
    "serve": ["megatron-ssm serve --model DIR", "megatron-ssm serve --model DIR --tp 2 --weights int8 --port 8080"],
    "convert": ["megatron-ssm convert --model DIR --weights int4 --out DIR-int4",
                "megatron-ssm convert --model mamba2-130m --out mamba2-130m-hf"],
    "advise": ["megatron-ssm advise --model DIR --fabric fabric.json --ranks 8"],
    "bench": ["megatron-ssm bench DIR --against transformers", "megatron-ssm bench DIR --weights bf16,int8,int4"],
    "prepare": ["megatron-ssm prepare --input texts --tokenizer-model DIR --out corpus"],
    "new": ["megatron-ssm new my-model"],
    "doctor": ["megatron-ssm doctor"],
}  # fmt: skip


class _NamedDirectories(argparse.Action):
    """Collects the values NAME=DIR of a repeatable option in a dictionary."""

    def __call__(self, parser, namespace, value, option=None):  # noqa: D102
        name, _, directory = value.partition("=")
        before = getattr(namespace, self.dest)
        if not name or not directory or name in before:
            reason = f"{name} has been given before" if name in before else "expected NAME=DIR"
            raise argparse.ArgumentError(self, f"{value!r}: {reason}")
        setattr(namespace, self.dest, {**before, name: directory})


def parser() -> Parser:
    """The parser of the command line. Formats and dtypes are strings, so that --help does not import torch."""
    main = Parser(
        EXAMPLES["main"], prog="megatron-ssm", description="State-space language models on one or many ranks."
    )
    main.add_argument("--version", action="version", version=f"megatron-ssm {version()}", help="print the version")
    _add_hidden(main, "--local_rank", "--local-rank")  # the deepspeed launcher puts it before the command
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    _add_generate(commands.add_parser("generate", help="continue a prompt", description="Continue a prompt."))
    about = "Talk with a model in the terminal. Each line of stdin is a message, also from a pipe."
    _add_chat(commands.add_parser("chat", help="a conversation in the terminal", description=about))
    about = "Serve a model over HTTP, with OpenAI's interface."
    _add_serve(commands.add_parser("serve", help="an HTTP server with OpenAI's interface", description=about))
    about = (
        "Convert a checkpoint of state-spaces/mamba into a Hugging Face directory, or the other way round; "
        "or the weights of DeepSpeed's checkpoint into a Hugging Face directory."
    )
    convert = commands.add_parser(
        "convert", help="checkpoints of state-spaces and DeepSpeed to Hugging Face's; quantized ones", description=about
    )
    convert.add_argument("--model", required=True, metavar="DIR", help="the checkpoint; its format is recognized")
    convert.add_argument("--out", metavar="DIR", help="directory of the result (not needed with --dry-run)")
    convert.add_argument(
        "--weights",
        choices=("int8", "int4", "bfloat16"),
        help="write a Hugging Face directory's matrices in 8 or 4 bits, or its model in bfloat16",
    )
    convert.add_argument("--lora", metavar="DIR", help=f"{LORA_HELP}: write the model with the adapters merged into it")
    convert.add_argument("--dry-run", action="store_true", help="check everything and print the table, write nothing")
    convert.add_argument("-v", "--verbose", action="store_true", help="print the table of tensors")
    about = (
        "How to divide a model over ranks: predicted times and memory of every division, and why one is the fastest."
    )
    _add_advise(commands.add_parser("advise", help="how to divide a model over ranks", description=about))
    about = "Measure prefill and decoding of a model, also beside transformers and llama.cpp, which take turns with it."
    _add_bench(commands.add_parser("bench", help="measure the speed of a model", description=about))
    about = "Tokenize text into a Megatron indexed dataset, PREFIX.bin and PREFIX.idx; run again, it continues."
    _add_prepare(commands.add_parser("prepare", help="text to an indexed dataset for training", description=about))
    about = "Write a training project into a new directory: configuration, data recipe and launch scripts."
    new = commands.add_parser("new", help="a new training project", description=about)
    new.add_argument("directory", metavar="DIR", help="a directory that does not exist yet, or is empty")
    about = "Versions, the kernels that run on this machine and why, and known problems: for a bug report."
    doctor = commands.add_parser("doctor", help="what is installed and which kernels run", description=about)
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    for name, command in commands.choices.items():
        command.examples = EXAMPLES.get(name, ())
    return main


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "auto"), default="auto",
                        help="of weights and activations (default: auto, the checkpoint's)")  # fmt: skip
    parser.add_argument(
        "--weights", choices=("int8", "int4"), help="keep the matrices in 8 or 4 bits (default: in --dtype)"
    )
    parser.add_argument("--reduce", choices=FORMATS, default="fp32", help="format of the block outputs' all-reduce")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")


def _add_model(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("directory", nargs="?", metavar="DIR", help=text)
    parser.add_argument("--model", metavar="DIR", help="another way to give DIR")


def _add_sampling_options(parser: argparse.ArgumentParser, default: str) -> None:
    """The options of sampling. default: what the help says of options that are left out."""
    parser.add_argument("--temperature", type=float, metavar="T", help=f"0: greedy search (default: {default})")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens only")
    parser.add_argument("--top-p", type=float, metavar="P",
                        help="sample from the most likely tokens only, up to this sum of probabilities")  # fmt: skip
    parser.add_argument("--min-p", type=float, metavar="P",
                        help="leave out tokens that are less likely than P times the most likely one")  # fmt: skip
    parser.add_argument("--repetition-penalty", type=float, metavar="R",
                        help="above 1, tokens that occurred before become less likely (default: 1)")  # fmt: skip
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this; repeatable")
    parser.add_argument("--seed", type=int, metavar="S", help="of the random numbers (default: another one each time)")


def _add_chat(chat: argparse.ArgumentParser) -> None:
    """The flags of `chat`. The engine has the defaults of `serve` for one conversation."""
    _add_model(chat, "Hugging Face directory with a chat template")
    chat.add_argument("--system", metavar="TEXT", help="a system message")
    chat.add_argument("--max-new-tokens", type=int, metavar="N", help="of a reply (default: up to the context)")
    chat.add_argument("--max-length", type=int, default=8192, metavar="N",
                      help="tokens of the conversation; then the oldest messages are dropped (default: 8192)")  # fmt: skip
    _add_sampling_options(chat, "that of generation_config.json, else 1")
    chat.add_argument("--tp", type=int, metavar="N", help="tensor-parallel ranks; alone, starts them itself")
    chat.add_argument("--ep", type=int, default=1, metavar="E", help=EP_HELP)
    _add_model_options(chat)
    chat.add_argument("--lora", type=lambda where: {where: where}, default={}, metavar="DIR", help=LORA_HELP)
    chat.add_argument("--chat-template", metavar="FILE", help=TEMPLATE_HELP)
    chat.set_defaults(
        slots=1, token_budget=512, prefix_gb=1, speculate=0, draft=None, draft_head=False, share_prefixes=True,
        served_model_name=[], tool_parser=None, lost_rank_timeout=15,
    )  # fmt: skip
    _add_hidden(chat, "--local_rank", "--local-rank", "--rendezvous")


def _add_serve(serve: argparse.ArgumentParser) -> None:
    _add_model(serve, "Hugging Face directory")
    serve.add_argument("--tp", type=int, metavar="N", help="tensor-parallel ranks; alone, starts them itself")
    serve.add_argument("--ep", type=int, default=1, metavar="E", help=EP_HELP)
    serve.add_argument("--replicas", type=int, default=1, metavar="R",
                       help="copies of the model behind one port, each of --tp times --ep ranks (default: 1)")  # fmt: skip
    serve.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, which only this machine can reach")
    serve.add_argument("--port", type=int, default=8000, metavar="P", help="0: any that is free (default: 8000)")
    serve.add_argument("--slots", type=int, default=16, metavar="N", help="requests in the batch (default: 16)")
    serve.add_argument("--max-length", type=int, default=4096, metavar="N",
                       help="tokens of a request, prompt and new ones together (default: 4096)")  # fmt: skip
    serve.add_argument("--token-budget", type=int, default=512, metavar="N",
                       help="tokens that a step reads, of all requests (default: 512)")  # fmt: skip
    serve.add_argument("--speculate", type=int, default=0, metavar="N",
                       help="propose up to N tokens by what followed the same words (default: 0)")  # fmt: skip
    serve.add_argument("--draft", metavar="DIR",
                       help="a small model with the same vocabulary that proposes them (default: up to 7)")  # fmt: skip
    serve.add_argument("--draft-head", action="store_true",
                       help="propose tokens with the checkpoint's draft head (mtp.*)")  # fmt: skip
    serve.add_argument("--max-waiting", type=int, default=256, metavar="N", help="requests; then 429 (default: 256)")
    serve.add_argument("--max-body-mb", type=float, default=1, metavar="MB", help="size of a request (default: 1)")
    serve.add_argument("--max-connections", type=int, default=512, metavar="N", help="then 503 (default: 512)")
    serve.add_argument("--arrival-timeout", type=float, default=60, metavar="S",
                       help="for a request's headers, for its body, for replies to be read (default: 60)")  # fmt: skip
    serve.add_argument("--allowed-host", action="append", default=[], metavar="NAME",
                       help="a host that requests may name besides localhost; repeatable")  # fmt: skip
    serve.add_argument("--allowed-origin", action="append", default=[], metavar="ORIGIN",
                       help="of web pages from elsewhere that may use the server (CORS); repeatable")  # fmt: skip
    serve.add_argument("--prefix-gb", type=float, default=1, metavar="GB",
                       help="memory of each rank for the states of prompts; 0: no prefix cache (default: 1)")  # fmt: skip
    serve.add_argument("--api-key-file", metavar="F", help="a file with one API key on each line (default: no keys)")
    serve.add_argument("--share-prefixes", action="store_true", help="share prefixes between API keys, too")
    serve.add_argument("--served-model-name", action="append", default=[], metavar="NAME",
                       help="default: the directory's name; repeatable, replies show the first")  # fmt: skip
    serve.add_argument("--chat-template", metavar="FILE", help=TEMPLATE_HELP)
    serve.add_argument("--tool-parser", choices=tuple(PARSERS),
                       help="format of the model's tool calls (default: that of the chat template)")  # fmt: skip
    serve.add_argument("--request-timeout", type=float, default=600, metavar="S", help="for a reply (default: 600)")
    serve.add_argument("--drain-timeout", type=int, default=60, metavar="S",
                       help="after SIGTERM, for open requests; then they end with an error (default: 60)")  # fmt: skip
    serve.add_argument("--lost-rank-timeout", type=float, default=15, metavar="S",
                       help="without a sign of life of a rank, until the server ends; 0: off (default: 15)")  # fmt: skip
    _add_model_options(serve)
    serve.add_argument("--lora", action=_NamedDirectories, default={}, metavar="NAME=DIR",
                       help=f"{LORA_HELP}, for requests whose model is NAME; repeatable")  # fmt: skip
    serve.add_argument("--log-level", choices=LEVELS, default="info",
                       help="debug: probes, too; warning: no requests that succeed (default: info)")  # fmt: skip
    serve.add_argument("--log-format", choices=LOG_FORMATS, default="text",
                       help="of the lines on stderr (default: text)")  # fmt: skip
    # from run_local_ranks, and the path of the socket of a replica and its number
    _add_hidden(serve, "--local_rank", "--local-rank", "--rendezvous", "--socket", "--replica")


def _add_generate(generate: argparse.ArgumentParser) -> None:
    _add_model(generate, "Hugging Face directory")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument("--prompt-file", metavar="F", help="a file that is one prompt, UTF-8; -: stdin")
    generate.add_argument("--chat", action="store_true", help="the prompt is a message: apply the chat template to it")
    generate.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: 64")
    _add_sampling_options(generate, "0")
    generate.add_argument("--tp", type=int, metavar="N", help="tensor-parallel ranks; alone, starts them itself")
    generate.add_argument("--cp", type=int, default=1, metavar="N", help="ranks that share the prompt (default: 1)")
    generate.add_argument("--ep", type=int, default=1, metavar="E", help=EP_HELP)
    _add_model_options(generate)
    generate.add_argument("--lora", metavar="DIR", help=LORA_HELP)
    generate.add_argument("--ignore-eos", action="store_true", help="do not stop at the tokens that end a text")
    generate.add_argument("--json", action="store_true", help="print one JSON object with text, tokens and timings")
    _add_hidden(generate, "--local_rank", "--local-rank", "--rendezvous")  # the last: from run_local_ranks


def _add_advise(advise: argparse.ArgumentParser) -> None:
    advise.add_argument("--model", required=True, metavar="DIR", help="Hugging Face directory, or its config.json")
    advise.add_argument(
        "--fabric", required=True, metavar="F", help="from `sparsefusion measure` or `sparsefusion fit`"
    )
    advise.add_argument("--ranks", type=int, metavar="N", help="default: the most that the fabric was measured on")
    advise.add_argument(
        "--device", metavar="NAME",
        help="a100, h100, h200, a JSON file with memory_gb, tflops and bandwidth_gb_s, or measured: time the model's parts "
        "on this machine (default: measured for a fabric between CPUs, otherwise h100)",
    )  # fmt: skip
    advise.add_argument("--memory-gb", type=float, metavar="GB", help="of a rank (default: the device's)")
    advise.add_argument(
        "--seq-length", type=int, default=2048, metavar="N", help="training: tokens of a sequence (default: 2048)"
    )
    advise.add_argument(
        "--global-batch-size", type=int, default=64, metavar="N", help="training: sequences per step (default: 64)"
    )
    advise.add_argument(
        "--micro-batch-size", type=int, default=1, metavar="N", help="training: at a time on a rank (default: 1)"
    )
    advise.add_argument(
        "--prompt", type=int, default=1024, metavar="N", help="generation: tokens of a prompt (default: 1024)"
    )
    advise.add_argument(
        "--new-tokens", type=int, default=256, metavar="N", help="generation: tokens of a reply (default: 256)"
    )
    advise.add_argument("--batch", type=int, default=1, metavar="N", help="generation: prompts at once (default: 1)")
    advise.add_argument(
        "--draft-head", action="store_true", help="generation: memory for the checkpoint's draft head (mtp.*)"
    )
    advise.add_argument("--json", action="store_true", help="print one JSON object")


def _add_bench(bench: argparse.ArgumentParser) -> None:
    _add_model(bench, "Hugging Face directory")
    bench.add_argument("--against", type=lambda text: dict(each.partition("=")[::2] for each in text.split(",")),
                       default={}, metavar="PEERS", help="transformers,llama.cpp=FILE.gguf, or one of them")  # fmt: skip
    bench.add_argument("--weights", type=lambda text: text.split(","), metavar="FORMATS",
                       help=f"some of {','.join(WEIGHTS)} (default: as they are stored)")  # fmt: skip
    bench.add_argument("--threads", type=int, metavar="N", help="of every engine (default: PyTorch's number)")
    bench.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="default: 512")
    bench.add_argument("--new-tokens", type=int, default=32, metavar="N", help="default: 32")
    bench.add_argument("--repetitions", type=int, metavar="N", help="default: 3 to 10, about a minute in all")
    bench.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    bench.add_argument("--json", action="store_true", help="print one JSON object")


def _add_prepare(prepare: argparse.ArgumentParser) -> None:
    prepare.add_argument("--input", nargs="+", default=[], metavar="FILE",
                         help="files or folders: JSON lines (also .gz), Parquet, or UTF-8 text")  # fmt: skip
    prepare.add_argument("--out", required=True, metavar="PREFIX", help="the result's path without its suffix")
    prepare.add_argument("--tokenizer-model", default="byte", metavar="T",
                         help="'byte', a tokenizer.json, or its folder (default: byte)")  # fmt: skip
    prepare.add_argument("--text-column", default="text", metavar="C",
                         help="the string of each line or row that is its document (default: text)")  # fmt: skip
    prepare.add_argument("--document-separator", metavar="LINE", help="a line that separates documents of a text file")
    prepare.add_argument("--dataset", metavar="D",
                         help="in place of --input: a dataset of Hugging Face, by name, or a folder of one")  # fmt: skip
    prepare.add_argument("--dataset-split", default="train", metavar="S", help="default: train")
    prepare.add_argument("--workers", type=int, metavar="N", help="threads that tokenize (default: one per core)")


def _add_hidden(parser: argparse.ArgumentParser, *flags: str) -> None:
    """Flags that launchers pass, and that the help does not show."""
    for flag in flags:
        parser.add_argument(flag, help=argparse.SUPPRESS)


def main(argv: list[str] | None = None) -> int:
    """Run a command line, by default that of the process; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if code := run("megatron_ssm", adopt_launcher):
        return code
    if sys.stdin is None:  # closed before the program began
        sys.stdin = open(os.devnull)
    arguments = parser().parse_args(argv)
    if arguments.command in ("generate", "chat", "serve", "bench"):
        given = [each for each in (arguments.directory, arguments.model) if each is not None]
        if len(given) != 1:
            parser().error(f"{arguments.command} needs the directory of one model: {arguments.command} DIR")
        arguments.model = given[0]
    if arguments.command in ("generate", "chat", "serve"):
        return {"generate": _generate, "chat": _chat, "serve": _serve}[arguments.command](arguments, argv)
    commands = {"convert": _convert, "doctor": _doctor, "advise": _advise, "prepare": _prepare, "new": _new}
    return (commands | {"bench": _bench})[arguments.command](arguments)


def _generate(arguments: argparse.Namespace, argv: list[str]) -> int:
    """Generate on this rank or, without a launcher, start the local ranks of --tp, --cp and --ep."""
    for name in ("tp", "cp", "ep"):
        _check(arguments, name, 1)
    if arguments.cp > 1 and arguments.ep > 1:
        parser().error(f"--cp {arguments.cp} and --ep {arguments.ep}: generate has one of them")
    _check_lora(arguments)
    tensor = arguments.tp or 1
    world = tensor * arguments.cp * arguments.ep
    if arguments.prompt_file == "-":
        if "WORLD_SIZE" in os.environ:
            parser().error("--prompt-file -: the ranks of a launcher have no stdin of their own, so name a file")
        with tempfile.NamedTemporaryFile(prefix="stdin-") as file:
            file.write(sys.stdin.buffer.read())
            file.flush()
            return main([*argv, "--prompt-file", file.name])
    if "WORLD_SIZE" not in os.environ and world > 1:
        code = _check_models("megatron-ssm generate", [arguments.model], tensor, arguments.ep)
        return code or run_local_ranks(argv, world)
    leave_on_interrupt()
    silence_third_parties()

    def command() -> None:
        with _naming_the_extra():
            from .commands import generate

            generate(arguments)

    return run("megatron-ssm generate", command)


def _chat(arguments: argparse.Namespace, argv: list[str]) -> int:
    """Chat on this rank or, without a launcher, start the local ranks of --tp and --ep."""
    for name in ("tp", "ep", "max_new_tokens"):
        _check(arguments, name, 1)
    _check(arguments, "max_length", 2)
    _check_lora(arguments)
    world = (arguments.tp or 1) * arguments.ep
    if "WORLD_SIZE" not in os.environ and world > 1:
        code = _check_models("megatron-ssm chat", [arguments.model], arguments.tp or 1, arguments.ep)
        return code or run_local_ranks(argv, world, passes_signals=True)
    leave_on_interrupt()
    if arguments.rendezvous and this_rank() == 0:  # from run_local_ranks
        accept_passed_interrupts()
    silence_third_parties()

    def command() -> None:
        with _naming_the_extra():
            from .chat import chat
        chat(arguments)

    return run("megatron-ssm chat", command)


@contextmanager
def _naming_the_extra() -> Iterator[None]:
    """Turn the error for a missing package of the server into a ValueError that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "pydantic", "prometheus_client", "jinja2"):
            raise
        raise ValueError(
            f"there is no package {error.name}: pip install '.[serve]' in a checkout of megatron-ssm"
        ) from None


def _serve(arguments: argparse.Namespace, argv: list[str]) -> int:
    """Serve with this rank or, without a launcher, start the replicas, or the local ranks of --tp and --ep."""
    minima = dict(
        tp=1, ep=1, replicas=1, port=0, slots=1, max_length=2, token_budget=2, speculate=0, max_waiting=0, prefix_gb=0,
        drain_timeout=1, request_timeout=1, lost_rank_timeout=0, max_body_mb=0.001,
        max_connections=1, arrival_timeout=1,
    )  # fmt: skip
    for name, minimum in minima.items():
        _check(arguments, name, minimum, 2**16 if name == "port" else LIMIT)
    if arguments.token_budget <= arguments.slots:
        parser().error(f"--token-budget {arguments.token_budget} must be above --slots {arguments.slots}")
    if not arguments.host.strip():
        parser().error("--host is empty: it must be a host name or an address (0.0.0.0: every network)")
    if arguments.draft is not None and arguments.ep > 1:
        parser().error(
            f"--draft {arguments.draft} and --ep {arguments.ep}: the draft model is not divided over experts"
        )
    _check_lora(arguments)
    tensor, experts = arguments.tp or 1, arguments.ep
    is_router, is_launched = arguments.replicas > 1 and arguments.socket is None, "WORLD_SIZE" in os.environ
    if is_router and is_launched:
        parser().error(f"--replicas {arguments.replicas}: the server starts the replicas itself, without a launcher")
    if not is_launched and tensor * experts > 1:
        models = [directory for directory in (arguments.model, arguments.draft) if directory is not None]
        code = _check_models("megatron-ssm serve", models, tensor, experts)
        if code or not is_router:
            return code or run_local_ranks(argv, tensor * experts, passes_signals=True)
    leave_on_interrupt()
    if os.getpid() == 1:  # the first process of a container ignores signals without a handler
        signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # until the server runs
    if arguments.rendezvous and this_rank() == 0:  # from run_local_ranks
        accept_passed_interrupts()
    silence_third_parties()
    configure_log(arguments.log_level, arguments.log_format, arguments.replica)

    def command() -> None:
        with _naming_the_extra():
            if is_router:
                from megatron_ssm.server.replicated import serve_replicas

                return serve_replicas(arguments, argv)
            from megatron_ssm.server.command import serve
        serve(arguments)

    report = logging.getLogger("megatron_ssm").error if arguments.log_format == "json" else print_error
    return run("megatron-ssm serve", command, report)


def _check_models(program: str, directories: Sequence[str], ranks: int, experts: int) -> int:
    """Check, before any rank starts, that these models can be split over the ranks; returns an exit code.

    ranks, experts: the numbers of tensor-parallel and expert-parallel ranks.
    """

    def check() -> None:
        from megatron_ssm.layers.families import read_for_ranks

        for directory in directories:
            read_for_ranks(directory, ranks, experts)

    return run(program, check)


def _check(arguments: argparse.Namespace, name: str, minimum: float, limit: float = LIMIT) -> None:
    try:
        if (value := getattr(arguments, name)) is not None:
            check_number(f"--{name.replace('_', '-')}", value, minimum, limit)
    except ValueError as error:
        parser().error(str(error))


def _check_lora(arguments: argparse.Namespace) -> None:
    """Exit with an error if --lora and --weights are both given. Quantized directories are found by `peft.check_lora`."""
    if arguments.lora and arguments.weights:
        parser().error(f"--lora and --weights {arguments.weights}: LoRA adapters need a model that is not quantized")


def _convert(arguments: argparse.Namespace) -> int:
    if arguments.out is None and not arguments.dry_run:
        parser().error("convert needs --out DIR, or --dry-run")
    silence_third_parties()

    def command() -> None:
        from .commands import convert_checkpoint

        convert_checkpoint(arguments)

    return run("megatron-ssm convert", command)


def _advise(arguments: argparse.Namespace) -> int:
    leave_on_interrupt()
    silence_third_parties()

    def command() -> None:
        from megatron_ssm.plan.command import advise

        advise(arguments)

    return run("megatron-ssm advise", command)


def _bench(arguments: argparse.Namespace) -> int:
    for name, minimum in dict(threads=1, prompt_tokens=1, new_tokens=1, repetitions=3).items():
        _check(arguments, name, minimum)
    if unknown := set(arguments.weights or ()) - set(WEIGHTS):
        parser().error(f"--weights {min(unknown)}: expected some of {','.join(WEIGHTS)}")
    for name, file in arguments.against.items():
        if name not in PEERS or bool(file) != (name == "llama.cpp"):
            parser().error(f"--against {name}: expected transformers or llama.cpp=FILE.gguf")
        if find_spec(PEERS[name][0]) is None:
            parser().error(f"--against {name}: there is no package {PEERS[name][0]}: pip install {PEERS[name][1]}")
    leave_on_interrupt()
    silence_third_parties()

    def command() -> None:
        from .benchmark import bench

        bench(arguments)

    return run("megatron-ssm bench", command)


def _prepare(arguments: argparse.Namespace) -> int:
    _check(arguments, "workers", 1)
    if bool(arguments.input) == bool(arguments.dataset):
        parser().error("prepare needs --input or --dataset, and not both")
    leave_on_interrupt()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # before silence_third_parties turns it off
    if arguments.workers:
        os.environ["RAYON_NUM_THREADS"] = str(arguments.workers)  # the threads of tokenizers
    silence_third_parties()

    def command() -> None:
        from megatron_ssm.train.prepare import prepare

        made = prepare(
            arguments.input, arguments.out, arguments.tokenizer_model, arguments.text_column,
            arguments.document_separator, arguments.dataset, arguments.dataset_split, sys.stderr.isatty(),
        )  # fmt: skip
        counts = f"{made.documents:,} documents, {made.tokens:,} tokens of {made.text_bytes:,} bytes"
        print(f"{arguments.out}.bin, {arguments.out}.idx: {counts}")

    return run("megatron-ssm prepare", command)


def _new(arguments: argparse.Namespace) -> int:
    def command() -> None:
        from megatron_ssm.train.new_project import write_project

        print(write_project(arguments.directory))

    return run("megatron_ssm new", command)


def _doctor(arguments: argparse.Namespace) -> int:
    leave_on_interrupt()
    silence_third_parties()

    def command() -> None:
        from .doctor import doctor

        doctor(arguments.json)

    return run("megatron_ssm doctor", command)


def run_and_exit() -> NoReturn:
    """Run the command line and end the process with its exit code.

    It uses `os._exit`, because during a normal shutdown gloo's thread may still free a tensor, and then the process aborts
    because that thread cannot acquire the interpreter's lock.
    """
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    if sys.stdout is not None:
        sys.stdout.flush()
    with suppress(OSError):  # a full disk, which does not change the exit code
        if sys.stderr is not None:
            sys.stderr.flush()
    os._exit(code)
