"""The C kernels of this package, and `library.py`, which opens the C library of this or another package by ctypes.

In: the name of a package, and the argument types of its C functions.
Out: the library; or the reason why it cannot be used, in which case callers use their torch implementation.
"""
