"""The documentation names commands, links and tables that exist. Oracle: the files of the checkout."""

import ast
import importlib.util
import math
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chosen import by_default

from benchmarks.support import charts, table_charts
from benchmarks.support import tables as published
from docs.generated import command_options, commands_of, filled
from megatron_ssm.cli import main as megatron_ssm_commands
from megatron_ssm.train.options import parse_options
from ranks import run_ranks
from sparsefusion.cli import commands as sparsefusion_commands

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("commfabric", "sparsefusion", "attention2d", "commir", "megatron_ssm")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BENCHMARKS = [path for path in sorted((ROOT / "benchmarks").glob("*/*.py")) if path.parent.name != "support"]


def assert_none(found):
    """Fail if anything was found, and show each find on a line."""
    __tracebackhide__ = True
    assert not found, "\n".join(["", *map(str, found)])


def command_lines(text):
    """The shell words of each command in the text's ```sh and ```bash blocks."""
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(re.sub(r"^(\$ )?(\w+=\S* )*", "", line), comments=True)


def missing_names(words):
    """The make targets, scripts and modules that a command names and that do not exist."""
    if words[:1] == ["make"]:
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return [word for word in words[1:] if "=" not in word and not word.startswith("-") and word not in targets]
    if not words or Path(words[0]).name not in {"python", "python3", "torchrun", "deepspeed"}:
        return []
    modules = [name for flag, name in zip(words, words[1:], strict=False) if flag == "-m"]
    scripts = [word for word in words if word.endswith(".py")]
    return [name for name in modules if not is_runnable(name)] + [
        name for name in scripts if not (ROOT / name).exists()
    ]


def is_runnable(module):
    """Whether `python -m module` finds the module: in the checkout if the package is ours, otherwise among the installed."""
    top, *rest = module.split(".")
    if top not in PACKAGES:
        return importlib.util.find_spec(top) is not None
    path = ROOT.joinpath(top, *rest)
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_commands_on_the_pages_exist():
    missing = [
        f"{path.relative_to(ROOT)}: {shlex.join(words)}: no {name}"
        for path in PAGES
        for words in command_lines(path.read_text())
        for name in missing_names(words)
    ]
    assert_none(missing)


def pretraining(words):
    """(the number of ranks, the options) of a command that starts examples/pretrain.py; None for another command."""
    script = "examples/pretrain.py"
    if words[:1] == ["sbatch"]:  # the script says how many nodes, and how many GPUs each has
        place = next(place for place, word in enumerate(words) if word.endswith(".sh"))
        batch_script = (ROOT / words[place]).read_text()
        sizes = re.findall(r"^#SBATCH --(?:nodes|gpus-per-node)=(\d+)$", batch_script, re.MULTILINE)
        assert len(sizes) == 2, words
        return math.prod(map(int, sizes)), words[place + 1 :]
    if words[:1] in (["launch/torchrun.sh"], ["launch/deepspeed.sh"]):
        return int(words[1]), words[2:]
    if script not in words:
        return None
    before, after = words[: words.index(script)], words[words.index(script) + 1 :]
    flags = dict(zip(before, before[1:], strict=False))
    return int(flags.get("--nproc-per-node", flags.get("--num_accelerators", 1))), after


def test_training_commands_on_the_pages_fit_their_ranks(monkeypatch):
    """Their options are valid, replicas and accumulation divide, and a page that resumes DeepSpeed's folder writes it."""
    monkeypatch.chdir(ROOT)
    count = 0
    for path in PAGES:
        commands = filter(None, map(pretraining, command_lines(path.read_text())))
        parsed = [(ranks, parse_options(words, shlex.join(words))) for ranks, words in commands]
        count += len(parsed)
        written = {f"{options.out}/deepspeed" for _, options in parsed if options.save_deepspeed}
        for ranks, options in parsed:
            replica = options.tensor_model_parallel_size * options.context_parallel_size
            ranks = int(options.dry_run) if options.dry_run.isdecimal() else ranks
            assert ranks % replica == 0, (path, ranks, options.describe())
            try:
                options.accumulation(ranks // replica)
            except ValueError as error:
                pytest.fail(f"{path}, on {ranks} ranks, {options.describe()}: {error}")
            assert options.resume in {"", "newest", "auto", *written}, (path, options.resume)
    assert count > 15


def test_ranks_wait_for_each_other_before_they_destroy_their_groups():
    """Otherwise scripts that have just trained with DDP abort now and then."""
    folders = ("examples", "launch", "benchmarks", *PACKAGES)
    files = [
        *PAGES,
        *(path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh")),
    ]
    found, missing = 0, []
    for path in files:
        lines = path.read_text().splitlines()
        for index in (index for index, line in enumerate(lines) if "destroy_process_group()" in line):
            found += 1
            if "barrier()" not in "".join(lines[max(0, index - 4) : index + 1]):
                missing.append(f"{path.relative_to(ROOT)}:{index + 1}")
    assert found > 25
    assert_none(missing)


def test_relative_links_lead_to_files():
    links = re.compile(r"(?:\]\(|src(?:set)?=\")(?!\w+:|#)([^)#\s\"]+)")
    found = [(path, link) for path in PAGES for link in links.findall(path.read_text())]
    assert len(found) > 50
    assert_none([f"{path.relative_to(ROOT)}: {link}" for path, link in found if not (path.parent / link).exists()])


def test_members_that_the_reference_lists_exist():
    """Each is a function, a class or a property, of which a docstring is shown; mkdocstrings leaves out unknown names."""
    listed, missing = re.compile(r"^::: (\S+)\n(?:    .*\n)*?      members: \[(.+)\]$", re.MULTILINE), []
    texts = [page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")]
    found = [match for text in texts for match in listed.findall(text)]
    assert len(found) > 1
    for name, members in found:
        shown = {member: getattr(pkgutil.resolve_name(name), member, None) for member in members.split(", ")}
        described = {member for member, it in shown.items() if callable(it) or isinstance(it, property)}
        missing += [f"{name}: {member}" for member in shown.keys() - described]
    assert_none(missing)


def test_readme_has_at_most_200_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def slug(title):
    """The anchor of a section."""
    return re.sub(r"[^a-z0-9-]", "", title.lower().replace(" ", "-"))


def test_every_command_is_in_the_reference():
    """With its options, from the parsers themselves."""
    page = filled((ROOT / "docs" / "reference" / "commands.md").read_text())
    for program, module in (("megatron-ssm", megatron_ssm_commands), ("sparsefusion", sparsefusion_commands)):
        for name, parser in commands_of(module.parser()).items():
            assert f"[`{program} {name}`](#" in page and command_options(parser) in page, (program, name)


def test_generated_parts_of_the_pages_are_known():
    found = [re.findall(r"<!-- generated: .* -->", page.read_text()) for page in PAGES]
    assert sum(map(len, found)) > 15
    assert not [page for page in PAGES if "<!-- generated" in filled(page.read_text())]


def headlines():
    """(page, text) of each row of README's table of results, and of each item of the summary of the results."""
    readme, results = ROOT / "README.md", ROOT / "docs" / "results" / "index.md"
    for line in readme.read_text().splitlines():
        if re.match(r"\|.*docs/results/", line):
            yield readme, line
    summary = results.read_text().split("## In short\n")[1].split("\n## ")[0]
    for item in re.findall(r"^- .*\n(?:  .*\n)*", summary, re.MULTILINE):
        yield results, item


def test_headline_numbers_occur_on_the_pages_that_they_link_to():
    """The bold numbers of each headline: in the section that its link names, or on the whole page."""
    assert len(list(headlines())) >= 14
    for source, text in headlines():
        path, anchor = re.search(r"\(([\w/-]+\.md)#?([^)]*)\)", text).groups()
        page, numbers = (source.parent / path).read_text(), re.findall(r"\*\*(\d[^*]*)\*\*", text)
        if anchor:
            sections = re.split(r"^## ", page, flags=re.MULTILINE)
            (page,) = (section for section in sections if slug(section.splitlines()[0]) == anchor)
        assert numbers, text
        assert_none([f"{number!r} in {text!r}" for number in numbers if number not in page])


def test_first_lines_of_benchmarks_say_how_long_they_take():
    """`make bench` prints the first line of each, which contains "about N min"."""
    assert len(BENCHMARKS) > 20
    assert_none([path for path in BENCHMARKS if not re.search(r"about \d+ min", path.read_text().partition("\n")[0])])


MARKED = re.compile(r"^<!-- ([\w-]+) -->$", re.MULTILINE)


def table_names():
    """The names of all tables that benchmarks publish, sorted."""
    calls = [
        node for path in BENCHMARKS for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    ]
    return sorted(node.args[0].value for node in calls if ast.unparse(node.func).endswith("publish"))


def test_every_table_is_on_exactly_one_page():
    """Each is between two markers: one with its name, and the next one, `end`."""
    found = []
    for page in PAGES:
        text = page.read_text()
        markers = MARKED.findall(text)
        assert markers[1::2] == ["end"] * (len(markers) // 2) and len(markers) % 2 == 0, (page, markers)
        found += markers[::2]
        for name in markers[::2]:
            table = text.split(f"<!-- {name} -->\n")[1].split("<!-- end -->")[0].splitlines()
            assert len(table) >= 3 and all(line.startswith("| ") and line.endswith(" |") for line in table), name
            assert set(table[1]) == set("| -") and len({line.count(" | ") for line in table}) == 1, name
    assert sorted(found) == table_names() and len(found) >= 4


@pytest.mark.parametrize("emptied", by_default(("", table_names()[0]), ("", *table_names())))
def test_publishing_a_table_changes_nothing_else(emptied, tmp_path, monkeypatch):
    """Also if the table, or another one, is empty. A table that is on no page is an error and changes nothing.

    emptied: the name of the table that is empty before; then it and the others of its page are published.
    """
    names = table_names()
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.png", "*.svg"))
    monkeypatch.setattr(published, "DOCUMENTATION", tmp_path / "docs")
    pages = sorted((tmp_path / "docs").rglob("*.md"))
    if emptied:
        page = next(page for page in pages if f"<!-- {emptied} -->" in page.read_text())
        pattern = rf"(<!-- {emptied} -->\n).*?(<!-- end -->)"
        page.write_text(re.sub(pattern, r"\1\2", page.read_text(), count=1, flags=re.DOTALL))
        assert f"<!-- {emptied} -->\n<!-- end -->" in page.read_text()
        names = [name for name in names if f"<!-- {name} -->" in page.read_text()]
    for name in names:
        texts = {page: page.read_text() for page in pages}
        published.publish(name, published.markdown(["a", "b"], [["1", r"\1"]]))
        (changed,) = [page for page in pages if f"<!-- {name} -->" in texts[page]]
        before, rest = texts[changed].split(f"<!-- {name} -->\n")
        after = rest[rest.index("<!-- end -->") :]
        texts[changed] = f"{before}<!-- {name} -->\n| a | b |\n| --- | --- |\n| 1 | \\1 |\n{after}"
        assert {page: page.read_text() for page in pages} == texts
    with pytest.raises(ValueError, match="no page of docs/ has a table 'colours'"):
        published.publish("colours", "| a |")
    assert {page: page.read_text() for page in pages} == texts


def test_charts_are_those_of_the_published_tables(tmp_path, monkeypatch):
    """The texts in each, among them rows, links and speedups, are what `docs/figures/draw.py` draws now."""
    monkeypatch.setattr(charts, "FOLDER", tmp_path)
    table_charts.draw()
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) >= 12
    for path in drawn:
        texts, committed = (
            re.findall(r">([^<]+)</text>", (folder / path.name).read_text())
            for folder in (tmp_path, ROOT / "docs" / "assets" / "plots")
        )
        assert texts == committed, path.name


def test_benchmarks_and_examples_import():
    """Every name that they import exists. Run under another name than __main__, they only import and define."""

    def import_all(rank):
        sys.modules |= {"gguf": None, "llama_cpp": None}  # of the extra `peers`: absent where the tests are installed
        path = list(sys.path)
        for script in [*BENCHMARKS, *sorted((ROOT / "examples").glob("*.py"))]:
            sys.path[:] = [str(script.parent), str(ROOT), *path]
            runpy.run_path(str(script), run_name="imported")

    run_ranks(import_all, 1)  # in a fork, which has what the tests import


def message_templates():
    """The texts that the packages can print: string literals, with `...` for each value of an f-string."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "...".join(part.value if isinstance(part, ast.Constant) else "" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_messages_on_the_troubleshooting_page_exist():
    """The fixed words of each message occur, in this order, in one string of the sources."""
    rows = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) >= 25
    templates = set(message_templates())
    patterns = {row: re.compile(".*".join(map(re.escape, row.split("...")))) for row in rows}
    assert_none([row for row, pattern in patterns.items() if not any(map(pattern.search, templates))])


@pytest.mark.full
def test_operator_of_the_tutorial_runs(tmp_path):
    """Each of its four ranks finds that its part is bitwise that of one process."""
    page = (ROOT / "docs" / "tutorials" / "own-operator.md").read_text()
    (tmp_path / "nearest.py").write_text(re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "nearest.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(
        r"\d True", done.stdout
    )  # under torchrun, a line and its end are two writes: ranks may share a line
    assert sorted(found) == [f"{rank} True" for rank in range(4)], done.stdout
