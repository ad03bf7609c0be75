"""The search for the best plan: all placements of a mesh's axes, their cost in closed form, and the fastest that fit.

In: a program, a mesh with the speeds of its levels, a memory budget. Out: plans, the best first, each with its reason.
May import: ir, programs, scheduling, lowering, execution.
"""
