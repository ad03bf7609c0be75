"""What all packages use and what does not need torch: exports that are imported when used, one-line errors of commands, and
the environment variables of launchers.

In: the names that a package exports; the flags and the work of a command; the environment.
Out: the package's `__getattr__`; an exit code, and the error on stderr; which rank this process is.
"""
