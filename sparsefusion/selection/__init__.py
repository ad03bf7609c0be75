"""Selects the elements of a gradient to send: sparsifiers, the selection fused into one pass, and packed indices.

In: a gradient, its residual and a number k.
Out: k values and their indices to send, and the residual for the next step.
"""
