"""Parts that all packages share and that need no torch: lazy exports, one-line errors of commands, and the environment
variables of launchers.

In: the names that a package exports; the flags and the function of a command; the environment.
Out: the package's `__getattr__`; an exit code, and the error on stderr; the rank of this process.
"""
