"""`SparseFusion`, the entry point of the package: it profiles dense steps, plans, times the best plans and saves its state.

In: a framework's object, and the user's mode, density and sparsifier.
Out: gradients reduced with fewer bytes, and a report of the predicted traffic.
"""
