"""From a schedule to a plan: which messages bring each operand from its home to where it is needed, as a list of steps.

In: a program, a mesh and primitives, as a `Schedule`. Out: a `Plan`, with its bytes, memory and time.
"""
