"""The command line: `python -m megatron_ssm COMMAND`. It checks the flags before it imports torch.

In: arguments. Out: text or JSON on stdout, one line on stderr for an error, and an exit code. `doctor.py` reports what is
installed, which kernels run here, and known problems of the installed versions.
"""
