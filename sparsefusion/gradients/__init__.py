"""Reduces gradients over ranks by a plan: dense, in float16, or sparse with residuals (the values not sent yet).

In: gradients of one rank in the order in which they become ready, and a plan.
Out: their means over the ranks, with the same bits on every rank. NaN and Inf of one rank reach all ranks.
"""
