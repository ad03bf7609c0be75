"""The command line: `python -m megatron_ssm COMMAND`. Imports torch after it has checked the flags.

In: arguments. Out: text or JSON on stdout, one line on stderr for an error, and an exit code.
"""
