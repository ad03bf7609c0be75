"""What every package needs before torch is loaded: lazy package exports, and command lines with one-line errors.

In: the names that a package exports; a function that parses arguments and one that does the work.
Out: the package's `__getattr__`; an exit status, with the error on stderr.
May import: no other room.
"""
