"""Collectives that count their bytes, wire formats, shared memory between ranks of one host, the store in which ranks meet,
and the comparison of their arguments, so that calls that differ raise an error instead of waiting forever.

In: tensors and a process group.
Out: the results on every rank, and the bytes that this rank sent.
"""
