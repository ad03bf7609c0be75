"""What messages cost on a network: measure it, fit line segments to it, predict from them, report it.

In: a process group to measure on, or files of measurements that others made.
Out: a `Fabric`, which predicts the seconds of a collective; tables and plots of it.
May import: foundation, collectives.
"""
