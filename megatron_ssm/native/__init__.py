"""The C kernels of this package as functions of torch tensors: what `ops`, `context` and `decoding` call on a CPU.

In: contiguous CPU tensors.
Out: results, written into the caller's tensors; or None where no kernel covers the arguments.
"""
