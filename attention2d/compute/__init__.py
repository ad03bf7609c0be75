"""Exact attention of one rank's shard: kernel calls on tiles, and messages along the grid's rows and columns.

A cell of the grid is one rank, or several that divide the heads between them (Ulysses).

In: a rank's queries, keys and values, and a grid.
Out: the rank's attention output and, in backward, its gradients.
"""
