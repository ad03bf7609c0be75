"""Reducing gradients over ranks by a plan: dense, in float16 or sparse, with residuals and skipped steps.

In: gradients of one rank in the order in which they become ready, and a plan.
Out: their means over the ranks, the same bits on every rank.
May import: native, collectives, selection, planning.
"""
