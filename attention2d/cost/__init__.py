"""The cost of a schedule in closed form: the bytes that a rank sends and the memory that it needs.

In: the shape of the attention and of the grid. Out: messages and bytes sent by a rank, and its peak memory in bytes in
addition to its inputs.
"""
