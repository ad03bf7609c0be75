"""Plans which gradients are sent dense or sparse, and which consecutive gradients are sent together.

(`selection` decides which elements of a sparse gradient are sent.)
In: sizes of gradients, the times at which they are ready, and a cost model of the network.
Out: a plan, the same on every rank, and the predicted time of a step under it.
"""
