"""The command line: `python -m megatron_ssm generate`, `doctor`, `convert` and the others.

In: arguments. Out: text or JSON on stdout, one line on stderr for an error.
Loads torch only once the arguments have been checked.
May import: configs, parallel, inference, checkpoints, diagnostics.
"""
