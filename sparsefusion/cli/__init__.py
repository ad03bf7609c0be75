"""The command line: `python -m sparsefusion` with the commands `measure`, `fit` and `report`.

In: arguments. Out: a fabric file, a table on stdout, a report with plots; an error is one line on stderr.
Only the command that communicates, `measure`, loads torch.
"""
