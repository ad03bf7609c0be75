"""Operators on one rank's tensors: selective scan, SSD, causal convolution, linear, AdamW; each with its plain twin.

In: tensors of this rank's channels. Out: tensors; gradients through autograd.
CUDA packages that may be missing are imported here, and only here.
May import: native.
"""
