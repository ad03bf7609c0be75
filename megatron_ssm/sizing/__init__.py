"""Formulas for the memory and the traffic of a rank, evaluated before a run is started.

In: a `Stack`, a number of ranks and the lengths of sequences.
Out: bytes of memory on a rank in inference and in training; bytes that decoding a token reads and sends.
"""
