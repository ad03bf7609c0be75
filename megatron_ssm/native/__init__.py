"""The C kernels of this package as functions of torch tensors: what `ops` and `decoding` call on a CPU.

In: contiguous CPU tensors.
Out: results in tensors that the caller gives, or None for what the kernels do not cover.
May import: no other sub-package.
"""
