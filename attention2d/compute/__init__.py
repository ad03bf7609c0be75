"""Exact attention of one call: tiles, the merging of partial results, the passes over rows and columns, and heads.

In: a rank's queries, keys and values, and a grid.
Out: the rank's attention output and, in backward, its gradients.
May import: layout.
"""
