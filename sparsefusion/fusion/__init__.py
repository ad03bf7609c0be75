"""`SparseFusion`, the front of the package: profile dense steps, plan, time the best plans, save its state.

In: a framework's object and the mode, the density and the sparsifier that the user asks for.
Out: gradients reduced with fewer bytes, and a report of what was sent.
"""
