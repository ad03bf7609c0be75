"""Choosing which numbers of a gradient to send: sparsifiers, the selection fused into one pass, and packed indices.

In: a gradient, its residual and a number k.
Out: k indices and values to send; the residual that stays for the next step.
May import: native, collectives.
"""
