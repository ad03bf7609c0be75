"""`python -m megatron_ssm COMMAND`: see README.md for the contract of each command."""

import argparse
import os
import sys

from .arguments import Parser, leave_on_interrupt, quiet, run
from .local_ranks import run_local_ranks


def parser() -> Parser:
    """The command line. Formats and dtypes are names here, so that --help loads no torch."""
    main = Parser(prog="megatron_ssm", description="State-space language models on one or many ranks.")
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    generate = commands.add_parser("generate", help="continue a prompt", description="Continue a prompt.")
    generate.add_argument("--model", required=True, metavar="DIR", help="Hugging Face directory")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="F", help="a file that is one prompt, UTF-8")
    generate.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)")
    generate.add_argument("--top-k", type=int, metavar="K")
    generate.add_argument("--top-p", type=float, metavar="P")
    generate.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this; repeatable")
    generate.add_argument("--seed", type=int, metavar="S")
    generate.add_argument("--tp", type=int, metavar="N", help="tensor-parallel ranks; alone, starts them itself")
    generate.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    generate.add_argument("--reduce", choices=("fp32",), default="fp32", help="format of the block outputs' all-reduce")
    generate.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    generate.add_argument("--ignore-eos", action="store_true", help="do not stop at the end-of-text token")
    generate.add_argument("--json", action="store_true", help="print one JSON object with text, tokens and timings")
    for hidden in ("--rendezvous", "--local_rank", "--local-rank"):  # our own ranks; the deepspeed launcher
        generate.add_argument(hidden, help=argparse.SUPPRESS)
    return main


def main(argv=None) -> int:
    """Run a command line; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser().parse_args(argv)
    if arguments.tp is not None and arguments.tp < 1:
        parser().error(f"--tp {arguments.tp} must be at least 1")
    if "WORLD_SIZE" not in os.environ and (arguments.tp or 1) > 1:
        return run_local_ranks(argv, arguments.tp)
    leave_on_interrupt()
    quiet()

    def command():
        from .commands import generate

        generate(arguments)

    return run("megatron_ssm generate", command)


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.stderr.flush()
    os._exit(code) if code else sys.exit(0)
