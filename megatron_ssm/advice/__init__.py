"""How to divide a model over ranks, before they are rented: predicted times and memory of every division.

In: a `Stack`, a `sparsefusion.Fabric`, what a rank computes with, and the lengths of sequences.
Out: for training and for generation, the divisions from the fastest to the slowest, and why each is or is not the first.
"""
