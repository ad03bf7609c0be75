"""Environments for packages that are tested as their users install them."""

import subprocess
import sys

from servers import LIMIT_S


def python_with(directory, *packages):
    """The Python of a new environment in which these packages are installed."""
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    python = directory / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile", *packages]
    subprocess.run(install, check=True, timeout=LIMIT_S * 10)
    return python
