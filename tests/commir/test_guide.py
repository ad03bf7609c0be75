"""The program in docs/guides/schedules.md. Oracle: what it says itself, that every rank's outputs are exact."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "schedules.md"


def test_the_program_of_the_guide_runs(tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # Ranks write at the same time, so that their lines may be joined.
    assert sorted(re.findall(r"(\d) (True|False)", done.stdout)) == [(str(rank), "True") for rank in range(4)]
    assert "nearest on Mesh(" in done.stdout and "chosen: " in done.stdout


def test_the_program_of_the_guide_is_short():
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for line in code.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(lines) <= 30
