"""Parts that all packages share and that do not need torch: exports imported when used, one-line errors of commands, and
the environment variables of launchers.

In: the names that a package exports; the flags and the work of a command; the environment.
Out: the package's `__getattr__`; an exit code, and the error on stderr; which rank this process is.
"""
