"""The C kernels of this package as functions of torch tensors; `ops`, `tape` and `context` call them.

In: CPU tensors.
Out: new tensors, or states that are overwritten.
"""
