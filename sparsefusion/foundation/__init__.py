"""What all packages use and what does not need torch: exports that are imported when used, and one-line errors of commands.

In: the names that a package exports; the flags and the work of a command.
Out: the package's `__getattr__`; an exit code, and the error on stderr.
"""
