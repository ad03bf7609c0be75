"""The C kernels of this package, and the loader that finds, checks and opens a package's C library with ctypes.

In: the name of a package. Out: its library with typed functions,
or the reason why it cannot be used, in which case torch does the work.
May import: no other room.
"""
