"""Deciding, gradient by gradient, what to send dense and what sparse, and which consecutive gradients to merge.

Which elements of a sparse gradient are sent is decided in `selection`.
In: sizes of gradients, the times at which they are ready, and a cost model of the network.
Out: a plan, the same on every rank, and the predicted time of a step under it.
"""
