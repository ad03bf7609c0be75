"""A cost model of the network: measures collectives, fits line segments to their times, predicts and reports them.

In: a process group to measure on, or files of measurements that others made.
Out: a `Fabric`, which predicts the seconds that a collective takes; tables and plots.
"""
