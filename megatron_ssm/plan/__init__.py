"""Recommends how to divide a model over ranks before they are rented: predicts the time and memory of every division.

In: a `Stack`, a `commfabric.Fabric`, the rates of a rank's processor, and the lengths of sequences.
Out: for training and for generation, the divisions from the fastest to the slowest, and the reason for their order.
"""
