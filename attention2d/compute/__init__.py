"""Exact attention of one rank's shard: kernel calls on tiles, messages along the grid's rows and columns, divided heads.

In: a rank's queries, keys and values, and a grid.
Out: the rank's attention output and, in backward, its gradients.
May import: layout.
"""
