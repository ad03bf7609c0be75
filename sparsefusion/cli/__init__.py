"""The command line: `python -m sparsefusion fabric`, `predict`, `advise` and the others.

In: arguments. Out: JSON or a table on stdout, files where asked, one line on stderr for an error.
Loads torch only in the commands that communicate.
May import: foundation, fabric.
"""
