"""Running plans: one machine per rank that takes a plan's steps, all in one process or each on its own rank; and verifying.

In: plans and tensors. Out: outputs, counted bytes and memory, and errors that name the first wrong element.
May import: ir, programs, scheduling, lowering.
"""
