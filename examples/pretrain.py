"""Pretrain a language model of any supported family on text files, on one rank or several.

torchrun --nproc-per-node 2 -- examples/pretrain.py --tensor-model-parallel-size 2 --data TEXT... --out DIR
"""

import os
import sys

from megatron_ssm.training.options import parse_options
from sparsefusion.foundation.command_line import leave_on_interrupt, run, silence_third_parties
from sparsefusion.foundation.launcher import adopt_launcher


def main() -> int:
    """Parse the options before torch is imported, then train; returns the exit code."""
    if code := run("pretrain.py", adopt_launcher):
        return code
    options = parse_options()
    leave_on_interrupt()
    silence_third_parties()

    def command() -> None:
        from megatron_ssm.training.pretraining import pretrain

        pretrain(options)

    return run("pretrain.py", command)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit of the interpreter may let gloo's thread abort the process
