"""Collectives that count their bytes, the formats of numbers on the wire, shared memory between ranks of one host,
and the comparison by which ranks find out that they were asked for different things.

In: tensors and a process group.
Out: the results on every rank, and the bytes that this rank sent.
May import: native.
"""
