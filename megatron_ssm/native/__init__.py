"""The C kernels of this package as functions of torch tensors.

In: contiguous CPU tensors.
Out: results in tensors that the caller gives, or None for what the kernels do not cover.
May import: no other room.
"""
