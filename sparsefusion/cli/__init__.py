"""The command line: `python -m sparsefusion measure`, `fit` and `report`, about the cost of messages.

In: arguments. Out: a fabric file, a table on stdout, a report with plots; one line on stderr for an error.
Loads torch only in the commands that communicate.
May import: foundation, fabric.
"""
