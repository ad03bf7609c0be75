"""The program in docs/guides/schedules.md. Oracle: what it says itself, that every rank's outputs are exact."""

import re
import runpy
from pathlib import Path

from ranks import run_agent

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "schedules.md"


def test_the_program_of_the_guide_runs(tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(code)
    assert run_agent(lambda: runpy.run_path(script), 4, tmp_path), (tmp_path / "err-0").read_text()
    first, *others = ((tmp_path / f"out-{rank}").read_text() for rank in range(4))
    assert first.startswith("0 True\n") and others == [f"{rank} True\n" for rank in (1, 2, 3)]
    assert "nearest on Mesh(" in first and "chosen: " in first


def test_the_program_of_the_guide_is_short():
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for line in code.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(lines) <= 30
