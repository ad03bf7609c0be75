"""Collectives that count their bytes, wire formats, shared memory between ranks of one host, and the comparison of
ranks' arguments, so that calls that differ raise an error instead of waiting for ever.

In: tensors and a process group.
Out: the results on every rank, and the bytes that this rank sent.
"""
