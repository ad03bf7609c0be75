"""What every package uses and what does not need torch: lazy exports, and command lines with one-line errors.

In: the names that a package exports; the flags and the work of a command.
Out: the package's `__getattr__`; an exit code, and the error on stderr.
May import: no other sub-package.
"""
