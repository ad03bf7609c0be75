"""`python -m megatron_ssm.cli.pretrain`: trains a language model, as `examples/pretrain.py` does."""

import os
import sys
from typing import NoReturn

from commfabric.foundation.command_line import leave_on_interrupt, run, silence_third_parties
from commfabric.foundation.launcher import adopt_launcher
from megatron_ssm.train.options import parse_options


def main() -> int:
    """Parse the options before torch is imported, then train; returns the exit code."""
    if code := run("pretrain.py", adopt_launcher):
        return code
    options = parse_options()
    leave_on_interrupt()
    silence_third_parties()

    def command() -> None:
        if options.dry_run:
            from megatron_ssm.plan.dry_run import dry_run

            return dry_run(options)
        from megatron_ssm.train.pretraining import pretrain

        pretrain(options)

    return run("pretrain.py", command)


def run_and_exit() -> NoReturn:
    """Run the command line, and end the process with its exit code."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit of the interpreter may let gloo's thread abort the process


if __name__ == "__main__":
    run_and_exit()
