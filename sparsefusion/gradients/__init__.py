"""Reducing gradients over ranks as a plan says: dense, in float16, or sparse with a residual (what was not sent yet).

In: gradients of one rank in the order in which they become ready, and a plan.
Out: their means over the ranks, the same bits on every rank. NaN and Inf of one rank reach all.
"""
