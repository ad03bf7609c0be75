"""Operators on one rank's tensors: selective scan, SSD, causal convolution, linear, AdamW; each with a
plain PyTorch version, to which the fast ones are compared.

In: tensors of this rank's channels. Out: tensors; gradients through autograd.
CUDA packages that may be missing are imported here, and only here.
"""
