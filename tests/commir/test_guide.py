"""The programs of the guide to commir and its how-to pages. Oracle: what they say, that every rank's outputs are exact."""

import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import commir
from ranks import run_agent

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("guides/schedules.md", "how-to/schedule-by-hand.md", "how-to/lay-out-a-layer.md")
GUIDE, BY_HAND, LAYER = (ROOT / "docs" / page for page in PAGES)


def program(page):
    """The only complete program of a page."""
    (found,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return found


def printed(code, folder):
    """The output of each of four ranks."""
    script = folder / "script.py"
    script.write_text(code)
    assert run_agent(lambda: runpy.run_path(script), 4, folder), (folder / "err-0").read_text()
    return [(folder / f"out-{rank}").read_text() for rank in range(4)]


def test_the_program_of_the_guide_runs(tmp_path):
    first, *others = printed(program(GUIDE), tmp_path)
    assert first.startswith("0 True\n") and others == [f"{rank} True\n" for rank in (1, 2, 3)]
    assert "attention on Mesh(" in first and "chosen: " in first


def test_the_layer_runs(tmp_path):
    first, *others = printed(program(LAYER), tmp_path)
    assert others == [f"layer on {rank}: True\n" for rank in (1, 2, 3)]
    assert first.endswith("layer on 0: True\n") and re.match(r"up: \w+ on \w+; \w+ on \w+; .*\ndown: ", first)


@pytest.mark.parametrize(
    "heading, end", [("Placements in its source", ".lower()"), ("Kernels of your own", ".verify(plan)")]
)
def test_the_examples_by_hand_make_right_plans(tmp_path, heading, end):
    section = BY_HAND.read_text().partition(f"## {heading}\n")[2].partition("\n#")[0]
    code = "\n".join(line for line in section.splitlines() if line.startswith("    "))
    assert code.startswith("    @commir.operator")
    names = "import commir, torch\nfrom commir import In, Out, grid, parallel, shift\n"
    (tmp_path / "example.py").write_text(names + textwrap.dedent(code))
    commir.verify(runpy.run_path(str(tmp_path / "example.py"))["plan"])


def test_the_names_in_its_text_exist():
    """A user who has imported `commir` has its public names, and no sub-packages; others are imported as the text says."""
    text = "".join((ROOT / "docs" / page).read_text() for page in PAGES)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    used = {name for span in spans for name in re.findall(r"(?<!from )\bcommir\.(\w+)", span)}
    assert {"search", "known", "GraphRunner"} <= used <= set(commir.__all__)
    imports = [span for span in spans if span.startswith("from ")]
    assert len(imports) == 1
    subprocess.run([sys.executable, "-c", "\n".join(imports)], check=True)


def test_the_programs_are_short():
    for page in (GUIDE, LAYER):
        lines = [line for line in program(page).splitlines() if line.strip() and not line.strip().startswith("#")]
        assert len(lines) <= 30, page
