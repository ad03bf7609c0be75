"""Collectives that count their bytes, wire formats, shared memory between ranks of one host, the rendezvous store, and the
comparison of arguments across ranks, so that differing calls raise an error instead of hanging.

In: tensors and a process group.
Out: the results on every rank, and the bytes that this rank sent.
"""
