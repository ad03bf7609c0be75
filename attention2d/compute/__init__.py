"""Exact attention of one rank's shard: kernel calls on tiles, and messages within cells and along the grid's axes.

In: a rank's queries, keys and values, and a grid.
Out: the rank's attention output and, in backward, its gradients.
May import: layout.
"""
