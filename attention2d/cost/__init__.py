"""Closed forms of what a schedule sends and what memory it takes.

In: the shape of the attention and of the grid.
Out: bytes that a rank sends, and bytes that it needs beside its inputs.
May import: compute.
"""
