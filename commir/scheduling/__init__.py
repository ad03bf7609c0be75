"""Schedules: which rank computes what, and in which order, as a program transformed by primitives with legality rules.

In: a program and a mesh. Out: a `LoopNest`, which says nothing yet about messages.
"""
