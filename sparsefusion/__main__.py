"""Runs the command line with `python -m sparsefusion`; the commands are in `sparsefusion.cli`."""

import sys

from sparsefusion.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
