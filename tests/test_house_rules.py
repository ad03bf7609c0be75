"""The rules of the house, read off the source; oracle: its syntax trees, the Makefile and the README."""

import ast
import importlib.util
import math
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("sparsefusion", "attention2d", "commir", "megatron_ssm")  # each imports only those to its left
PRESENT = [package for package in PACKAGES if (ROOT / package / "__init__.py").exists()]
PACKAGE_FILES = [path for package in PRESENT for path in sorted((ROOT / package).rglob("*.py"))]
ROOMS = ("examples", "launch", "benchmarks", "tests")
ALL_FILES = PACKAGE_FILES + [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
MEGATRON_FILES = {"megatron_ssm/parallel.py", "megatron_ssm/specs.py"}
BORROWED = {  # packages that may be missing or broken: what imports them finds out, and says so
    ("mamba_ssm", "causal_conv1d"): {"megatron_ssm/cuda_kernels.py"},
    ("transformer_engine", "apex"): {"megatron_ssm/fused_adam.py"},
}
WORLD_NAMES = {"world", "world_size", "tp", "dp", "cp"}  # parameters that multiply to the number of ranks


@cache
def tree(path):
    return ast.parse(path.read_text(), str(path))


def at(path, node):
    """file:line of a node, as in a compiler's message."""
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def nodes(paths, *kinds):
    """(path, node) of every node of these kinds."""
    return [(path, node) for path in paths for node in ast.walk(tree(path)) if isinstance(node, kinds)]


def imported_packages(node):
    """Top-level names that an import statement loads; none if it is relative."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    return [node.module.split(".")[0]] if node.level == 0 else []


def importers(*packages):
    """Files of ours that import one of these packages, anywhere in them."""
    found = nodes(PACKAGE_FILES, ast.Import, ast.ImportFrom)
    return {str(path.relative_to(ROOT)) for path, node in found if set(packages) & set(imported_packages(node))}


def assert_none(found):
    """Fail with everything found, one per line."""
    __tracebackhide__ = True
    assert not found, "\n".join(["", *map(str, found)])


# Imports


def test_packages_import_only_packages_to_their_left():
    def rightward(path, node):
        own = PACKAGES.index(path.relative_to(ROOT).parts[0])
        return set(PACKAGES[own + 1 :]) & set(imported_packages(node))

    found = nodes(PACKAGE_FILES, ast.Import, ast.ImportFrom)
    assert_none([f"{at(path, node)} imports {rightward(path, node)}" for path, node in found if rightward(path, node)])


def test_doors_are_thin():
    """The adapters of frameworks translate, and do nothing else: fewer than 100 lines each."""
    doors = [ROOT / "sparsefusion" / name for name in ("torch_ddp.py", "megatron_ddp.py", "deepspeed_engine.py")]
    assert_none([f"{path}: {count} lines" for path in doors if (count := len(path.read_text().splitlines())) >= 100])


def test_megatron_core_is_imported_in_two_files():
    assert_none(importers("megatron") - MEGATRON_FILES)


@pytest.mark.parametrize("packages", BORROWED)
def test_compiled_kernels_are_imported_in_one_file(packages):
    assert importers(*packages) == BORROWED[packages]


def test_importing_megatron_ssm_loads_no_torch():
    program = "import sys, megatron_ssm; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


EXPORTS = """
import importlib, sys, types
package = importlib.import_module(sys.argv[1])
loaded = dict(vars(package))  # before a lazy export loads a module, which would take the export's name
def exported(name):
    if name in loaded:
        return loaded[name]
    try:
        return package.__getattr__(name)
    except AttributeError:
        return None
print(*[name for name in sys.argv[2:] if not isinstance(exported(name), (types.ModuleType, type(None)))])
"""


@pytest.mark.parametrize("package", PRESENT)
def test_no_module_has_the_name_of_an_export(package):
    modules = {path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or path.is_dir()}
    modules = sorted(name for name in modules if not name.startswith("__"))
    command = [sys.executable, "-W", "ignore", "-c", EXPORTS, package, *modules]
    assert_none(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split())


# Docstrings


def definitions(node, owner=None):
    """(owner class or None, node) of each public class, function and method under a module or a class."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from definitions(child, owner)
        elif not child.name.startswith("_"):
            yield owner, child
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, child)


def may_go_without(owner, node):
    """One-line properties, and what a documented torch.autograd.Function overrides."""
    if owner is None or isinstance(node, ast.ClassDef):
        return False
    decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
    if decorators & {"property", "cached_property"}:
        return len(node.body) == 1
    bases = {ast.unparse(base).split(".")[-1] for base in owner.bases}
    return "Function" in bases and ast.get_docstring(owner) and node.name in {"forward", "backward", "setup_context"}


def test_public_names_have_docstrings():
    missing = [
        f"{at(path, node)} {node.name}"
        for path in PACKAGE_FILES
        for owner, node in definitions(tree(path))
        if not ast.get_docstring(node) and not may_go_without(owner, node)
    ]
    assert_none(missing)


# Habits


def test_no_exception_is_swallowed():
    def swallows(handler):
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        broad = any(kind is None or ast.unparse(kind) in {"Exception", "BaseException"} for kind in kinds)
        return broad and all(isinstance(line, ast.Pass) or ast.unparse(line) == "..." for line in handler.body)

    found = nodes(ALL_FILES, ast.ExceptHandler)
    assert_none([at(path, handler) for path, handler in found if swallows(handler)])


def test_nothing_unpickles():
    def unpickles(node):
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            return node.module == "pickle" or (node.module == "torch" and "load" in names)
        if isinstance(node, ast.Attribute):
            return ast.unparse(node) in {"pickle.load", "pickle.loads"}
        if ast.unparse(node.func) == "torch.load":
            return "weights_only=True" not in map(ast.unparse, node.keywords)
        return ast.unparse(node.func) == "pickle.Unpickler"  # a subclass that restricts find_class may be called

    found = nodes(PACKAGE_FILES, ast.ImportFrom, ast.Attribute, ast.Call)
    assert_none([at(path, node) for path, node in found if unpickles(node)])


def test_nothing_is_named_utils():
    assert_none([path for path in ALL_FILES if "utils" in path.relative_to(ROOT).with_suffix("").parts])


# Tests


def parametrizations(path, owner, function):
    """The (names, rows) of the parametrize marks of a test and its class; mark or values may be module constants."""
    constants = {
        target.id: node.value
        for node in tree(path).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def resolved(node):
        return constants.get(node.id, node) if isinstance(node, ast.Name) else node

    for mark in map(resolved, function.decorator_list + (owner.decorator_list if owner else [])):
        if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("mark.parametrize"):
            names = ast.literal_eval(mark.args[0])
            names = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
            yield names, [row_values(row, names) for row in getattr(resolved(mark.args[1]), "elts", [])]


def row_values(row, names):
    """The nodes of one row of a parametrization, one for each name."""
    if isinstance(row, ast.Call) and ast.unparse(row.func) == "pytest.param":
        return row.args
    return [row] if len(names) == 1 else getattr(row, "elts", [])


def world_sizes(names, rows):
    """The products of the literal integers that stand under world-like names."""
    columns = [index for index, name in enumerate(names) if name in WORLD_NAMES]
    worlds = [[getattr(row[index], "value", None) for index in columns] for row in rows if row]
    return {math.prod(world) for world in worlds if world and all(isinstance(size, int) for size in world)}


def test_tests_of_ranks_run_two_world_sizes():
    """Each takes `world`, `world_size`, `tp`, ... from a parametrize mark with at least two literal values."""
    lonely = [
        f"{at(path, node)} {node.name}"
        for path in sorted((ROOT / "tests").glob("test_*.py"))
        for owner, node in definitions(tree(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
        if "ranks" in {argument.arg for argument in node.args.args}
        if all(len(world_sizes(names, rows)) < 2 for names, rows in parametrizations(path, owner, node))
    ]
    assert_none(lonely)


# What the documentation promises


def command_lines(text):
    """The shell words of each command in ```sh and ```bash blocks."""
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(re.sub(r"^(\$ )?(\w+=\S* )*", "", line), comments=True)


def missing_from(words):
    """The make targets, scripts and modules that a command names and the checkout lacks."""
    if words[:1] == ["make"]:
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return [word for word in words[1:] if "=" not in word and not word.startswith("-") and word not in targets]
    if not words or Path(words[0]).name not in {"python", "python3", "torchrun", "deepspeed"}:
        return []
    modules = [name for flag, name in zip(words, words[1:], strict=False) if flag == "-m"]
    scripts = [word for word in words if word.endswith(".py")]
    return [name for name in modules if not runnable(name)] + [name for name in scripts if not (ROOT / name).exists()]


def runnable(module):
    """Whether `python -m module` finds something: in the checkout where the package is ours, else installed."""
    top, *rest = module.split(".")
    if top not in PACKAGES:
        return importlib.util.find_spec(top) is not None
    path = ROOT.joinpath(top, *rest)
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_the_commands_of_the_readme_exist():
    readme = ROOT / "README.md"
    text = readme.read_text() if readme.exists() else ""
    missing = [f"{shlex.join(words)}: no {name}" for words in command_lines(text) for name in missing_from(words)]
    assert_none(missing)


def test_benchmarks_tell_how_long_they_take():
    """`make bench` prints the first line of each, which says "(about N min)"."""
    benchmarks = [path for path in (ROOT / "benchmarks").glob("*.py") if not path.name.startswith("_")]
    silent = [path.name for path in benchmarks if not re.search(r"about \d+ min", path.read_text().partition("\n")[0])]
    assert_none(silent)


MARKED = re.compile(r"^<!-- ([\w-]+) -->$", re.MULTILINE)


def tables():
    """{name: benchmark} of every table that a benchmark publishes."""
    calls = nodes(sorted((ROOT / "benchmarks").glob("[!_]*.py")), ast.Call)
    return {node.args[0].value: path.name for path, node in calls if ast.unparse(node.func).endswith("publish")}


def test_every_benchmark_has_its_table_in_the_readme():
    """Between markers that follow one another: its name, the table, end."""
    text = (ROOT / "README.md").read_text()
    markers = MARKED.findall(text)
    assert markers[1::2] == ["end"] * (len(markers) // 2) and len(markers) % 2 == 0, markers
    assert sorted(markers[::2]) == sorted(tables()) and len(tables()) >= 4
    for name in tables():
        table = text.split(f"<!-- {name} -->\n")[1].split("<!-- end -->")[0].splitlines()
        assert len(table) >= 3 and all(line.startswith("| ") and line.endswith(" |") for line in table), name
        assert set(table[1]) == set("| -") and len({line.count(" | ") for line in table}) == 1, name


@pytest.mark.parametrize("emptied", ("", *sorted(tables())))
def test_publishing_a_table_changes_nothing_else(emptied, tmp_path, monkeypatch):
    """Also where it is empty, or another one is; a table that the README lacks is an error and changes nothing."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    shared, copy = importlib.import_module("_tables"), tmp_path / "README.md"
    monkeypatch.setattr(shared, "README", copy)
    text = (ROOT / "README.md").read_text()
    if emptied:
        text = re.sub(rf"(<!-- {emptied} -->\n).*?(<!-- end -->)", r"\1\2", text, count=1, flags=re.DOTALL)
        assert f"<!-- {emptied} -->\n<!-- end -->" in text
    for name in tables():
        copy.write_text(text)
        shared.publish(name, shared.markdown(["a", "b"], [["1", r"\1"]]))
        before, rest = text.split(f"<!-- {name} -->\n")
        after = rest[rest.index("<!-- end -->") :]
        assert copy.read_text() == f"{before}<!-- {name} -->\n| a | b |\n| --- | --- |\n| 1 | \\1 |\n{after}"
    copy.write_text(text)
    with pytest.raises(ValueError, match="README.md has no table 'colours'"):
        shared.publish("colours", "| a |")
    assert copy.read_text() == text
