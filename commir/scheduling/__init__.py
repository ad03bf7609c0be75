"""Schedules: which rank computes what, and in which order. A schedule is a program transformed by primitives.

In: a program and a mesh. Out: a `LoopNest`; the messages follow only when it is lowered.
"""
