"""From a schedule to a plan: a list of steps whose messages bring each operand from its home to where it is needed.

In: a program, a mesh and primitives, as a `Schedule`. Out: a `Plan`, with its bytes, memory and time.
"""
