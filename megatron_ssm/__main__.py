"""Runs the command line with `python -m megatron_ssm`; the commands are in `megatron_ssm.cli`."""

from megatron_ssm.cli.main import run_and_exit

if __name__ == "__main__":
    run_and_exit()
