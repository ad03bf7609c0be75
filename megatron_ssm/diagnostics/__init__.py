"""`doctor`: what is installed, which kernels run on this machine, and known problems of the installed versions.

In: the machine. Out: a report, with a warning and a remedy for each problem.
"""
