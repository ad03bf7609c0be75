"""Rules of the source: layout, imports, docstrings, habits. Oracle: the syntax trees of its files."""

import ast
import math
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("sparsefusion", "attention2d", "commir", "megatron_ssm")  # each imports only those to its left
PRESENT = [package for package in PACKAGES if (ROOT / package / "__init__.py").exists()]
PACKAGE_FILES = [path for package in PRESENT for path in sorted((ROOT / package).rglob("*.py"))]
# The sub-packages of each package in order: each imports only those before it.
ROOMS = {
    "sparsefusion": (
        "foundation native collectives fabric reduction selection planning gradients adapters fusion cli"
    ).split(),
    "attention2d": "layout compute cost schedules".split(),
    "megatron_ssm": (
        "configs native ops parallel layers decoding inference models checkpoints diagnostics training sizing "
        "integrations cli"
    ).split(),
}
FOLDERS = ("examples", "launch", "benchmarks", "tests")
ALL_FILES = PACKAGE_FILES + [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
MEGATRON_FILES = {"megatron_ssm/parallel/groups.py", "megatron_ssm/integrations/specs.py"}
OPTIONAL_IMPORTS = {  # packages that may be missing or broken: one file imports them, and says so
    ("mamba_ssm", "causal_conv1d"): {"megatron_ssm/ops/cuda_kernels.py"},
    ("transformer_engine", "apex"): {"megatron_ssm/ops/fused_adam.py"},
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


def rooms_imported(path):
    """The rooms of its own package that a file imports, other than its own."""
    package, room = path.relative_to(ROOT).parts[:2]
    names = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    rooms = {parts[1] for name in names if (parts := name.split("."))[0] == package and len(parts) > 1}
    return rooms & set(ROOMS[package]) - {room}


def test_every_room_is_in_the_order():
    for package in PRESENT:
        folders = {path.parent.name for path in (ROOT / package).glob("*/*.py")}
        assert folders == set(ROOMS[package]), package


def test_relative_imports_stay_in_their_room():
    """Across rooms imports are absolute, so that a file shows which rooms it uses."""
    found = nodes(PACKAGE_FILES, ast.ImportFrom)
    assert_none([at(path, node) for path, node in found if node.level > 1])


@pytest.mark.parametrize("package", PRESENT)
def test_rooms_import_earlier_rooms_only_as_their_docstrings_say(package):
    """The last line of a room's docstring is "May import: ..." with exactly the rooms that its files import."""
    for index, room in enumerate(ROOMS[package]):
        folder = ROOT / package / room
        imported = set().union(*(rooms_imported(path) for path in folder.glob("*.py")))
        assert imported <= set(ROOMS[package][:index]), f"{package}/{room} imports {imported}"
        last = ast.get_docstring(tree(folder / "__init__.py")).splitlines()[-1]
        expected = ", ".join(name for name in ROOMS[package] if name in imported) or "no other room"
        assert last == f"May import: {expected}.", f"{package}/{room}/__init__.py"


def test_adapters_are_thin():
    """The adapters of frameworks translate, and do nothing else: fewer than 100 lines each."""
    adapters = [
        ROOT / "sparsefusion" / "adapters" / name for name in ("torch_ddp.py", "megatron_ddp.py", "deepspeed_engine.py")
    ]
    assert_none([f"{path}: {count} lines" for path in adapters if (count := len(path.read_text().splitlines())) >= 100])


def test_megatron_core_is_imported_in_two_files():
    assert_none(importers("megatron") - MEGATRON_FILES)


@pytest.mark.parametrize("packages", OPTIONAL_IMPORTS)
def test_compiled_kernels_are_imported_in_one_file(packages):
    assert importers(*packages) == OPTIONAL_IMPORTS[packages]


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


# Sizes


def test_folders_have_at_most_fourteen_modules():
    folders = {path.parent for path in ALL_FILES}
    counts = {folder: len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) for folder in folders}
    assert_none([f"{folder.relative_to(ROOT)}: {count} modules" for folder, count in counts.items() if count > 14])


def test_files_are_read_in_one_sitting():
    counts = {path: len(path.read_text().splitlines()) for path in PACKAGE_FILES}
    assert_none([f"{path.relative_to(ROOT)}: {count} lines" for path, count in counts.items() if count > 350])


def test_functions_fit_a_screen():
    """Half of them take ten lines or fewer, nine in ten 35 or fewer (with docstrings)."""
    found = nodes(PACKAGE_FILES, ast.FunctionDef)
    lines = [node.end_lineno - node.lineno + 1 for _, node in found]
    assert statistics.median(lines) <= 10
    assert statistics.quantiles(lines, n=10)[-1] <= 35


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
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for owner, node in definitions(tree(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
        if "ranks" in {argument.arg for argument in node.args.args}
        if all(len(world_sizes(names, rows)) < 2 for names, rows in parametrizations(path, owner, node))
    ]
    assert_none(lonely)
