"""The search for the best plan: all placements of a mesh's axes, their cost in closed form, and the fastest that fit.

In: a program, or a graph of operators; a mesh with the speeds of its levels; a memory budget. Out: plans, the best first,
each with its reason; for a graph, the plan of each operator and a runner for them.
"""
