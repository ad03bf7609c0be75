"""The C kernels of this package, and the loader that finds, checks and opens the C library of any package with ctypes.

In: the name of a package, and the argument types of its C functions.
Out: the library, or the reason why it cannot be used; then the same operations run in torch.
May import: no other room.
"""
