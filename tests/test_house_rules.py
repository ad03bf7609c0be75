"""Rules of the source: layout, imports, docstrings, annotations, habits. Oracle: the syntax trees of its files."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "commfabric",
    "sparsefusion",
    "attention2d",
    "commir",
    "megatron_ssm",
)  # each imports only packages to its left
PRESENT = [package for package in PACKAGES if (ROOT / package / "__init__.py").exists()]
PACKAGE_FILES = [path for package in PRESENT for path in sorted((ROOT / package).rglob("*.py"))]
# The sub-packages of each package in order: each imports only those before it.
ROOMS = {
    "commfabric": "foundation native collectives fabric reduction".split(),
    "sparsefusion": "selection planning gradients adapters fusion cli".split(),
    "attention2d": "layout compute cost schedules".split(),
    "commir": "ir programs scheduling lowering execution searching".split(),
    "megatron_ssm": "spec kernels parallel layers model engine checkpoints train plan server integrations cli".split(),
}
# Imports from later rooms, inside a function: `Model.generate` has the name and the arguments of transformers.
LATER = {"megatron_ssm/model/model.py": {"engine"}}
FOLDERS = ("examples", "launch", "benchmarks", "tests")
ALL_FILES = PACKAGE_FILES + [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
MEGATRON_FILES = {
    "megatron_ssm/parallel/groups.py", "megatron_ssm/integrations/specs.py", "megatron_ssm/train/indexed.py",
    "megatron_ssm/train/megatron_trainer.py",
} | {f"megatron_ssm/integrations/megatron_{name}.py" for name in ("gpt", "layers", "split", "weights")}  # fmt: skip
OPTIONAL_IMPORTS = {  # packages that may be missing or broken: a single file imports them and handles the failure
    ("mamba_ssm", "causal_conv1d", "fla"): set(),  # cuda_kernels.KERNELS names their modules
    ("transformer_engine", "apex"): {"megatron_ssm/kernels/fused_adam.py"},
    ("llguidance",): {"megatron_ssm/engine/grammar.py", "megatron_ssm/engine/grammar_check.py"},
    ("lm_eval",): {"megatron_ssm/integrations/lm_eval.py"},
    ("deepspeed",): {"megatron_ssm/train/deepspeed_trainer.py"},
    ("tensorboard", "wandb"): {"megatron_ssm/train/tracking.py"},
    ("transformers",): {"megatron_ssm/cli/benchmark.py", "megatron_ssm/integrations/lm_eval.py"},
    ("llama_cpp",): {"megatron_ssm/cli/benchmark.py"},
    ("pyarrow", "datasets"): {"megatron_ssm/train/prepare.py"},
}
# Pages of the design, which are not part of the repository.
DESIGN_PAGES = re.compile(
    r"(?<![\w/-])(?:ssm|attention2d|gradcomm|commir|context|packaging|style|stack|hybrids|gated_delta_net|experts|flags)\.md\b"
)


@cache
def tree(path):
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


def at(path, node):
    """The file and line of a node, as compilers print them: file:line."""
    return f"{path.relative_to(ROOT)}:{node.lineno}"


@cache
def all_nodes(path):
    """Every node of a file."""
    return list(ast.walk(tree(path)))


def nodes(paths, *kinds):
    """(path, node) of every node of these kinds."""
    return [(path, node) for path in paths for node in all_nodes(path) if isinstance(node, kinds)]


def imported_packages(node):
    """The top-level packages that an import statement names; none if it is relative."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    return [node.module.split(".")[0]] if node.level == 0 else []


def importers(*packages):
    """The files of our packages with an import of one of `packages`, at the top or in a function."""
    found = nodes(PACKAGE_FILES, ast.Import, ast.ImportFrom)
    return {str(path.relative_to(ROOT)) for path, node in found if set(packages) & set(imported_packages(node))}


def assert_none(found):
    """Fail if anything was found, and show each find on a line."""
    __tracebackhide__ = True
    assert not found, "\n".join(["", *map(str, found)])


# Imports


def test_packages_import_only_packages_to_their_left():
    def later_packages(path, node):
        own = PACKAGES.index(path.relative_to(ROOT).parts[0])
        return set(PACKAGES[own + 1 :]) & set(imported_packages(node))

    found = nodes(PACKAGE_FILES, ast.Import, ast.ImportFrom)
    assert_none([f"{at(path, node)} imports {later}" for path, node in found if (later := later_packages(path, node))])


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
    return (rooms & set(ROOMS[package])) - {room} - LATER.get(str(path.relative_to(ROOT)), set())


def test_every_room_is_in_the_order():
    for package in PRESENT:
        folders = {path.parent.name for path in (ROOT / package).glob("*/*.py")}
        assert folders == set(ROOMS[package]), package


def test_relative_imports_stay_in_their_room():
    """Imports from other rooms are absolute, so that a file shows which rooms it uses."""
    found = nodes(PACKAGE_FILES, ast.ImportFrom)
    assert_none([at(path, node) for path, node in found if node.level > 1])


@pytest.mark.parametrize("package", PRESENT)
def test_rooms_import_earlier_rooms_only(package):
    for index, room in enumerate(ROOMS[package]):
        imported = set().union(*(rooms_imported(path) for path in (ROOT / package / room).rglob("*.py")))
        assert imported <= set(ROOMS[package][:index]), f"{package}/{room} imports {imported}"


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in PACKAGE_FILES
}


def modules_imported(path):
    """The modules of our packages that a file imports when it is loaded, or for annotations alone."""
    nodes, names = list(tree(path).body), set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            folder = [".".join(path.relative_to(ROOT).parent.parts)] if node.level else []
            base = ".".join(folder + [node.module] * bool(node.module))
            names |= {name if name in MODULES else base for name in (f"{base}.{alias.name}" for alias in node.names)}
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            nodes += ast.iter_child_nodes(node)
    return {name for name in names if name in MODULES}


def test_no_module_imports_itself_through_others():
    """Imports for annotations count (TYPE_CHECKING), those inside functions do not."""
    graph = {name: modules_imported(path) - {name} for name, path in MODULES.items()}
    while ends := {name for name in graph if not graph[name] or not any(name in each for each in graph.values())}:
        graph = {name: imported - ends for name, imported in graph.items() if name not in ends}
    assert_none([f"{name} imports {', '.join(sorted(imported))}" for name, imported in sorted(graph.items())])


def test_megatron_core_is_imported_in_few_files():
    assert_none(importers("megatron") - MEGATRON_FILES)


@pytest.mark.parametrize("packages", OPTIONAL_IMPORTS)
def test_optional_packages_are_imported_in_one_file(packages):
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


# Docstrings


def definitions(node, owner=None):
    """(class or None, node) of each public class, function and method in a module or a class, but not in functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from definitions(child, owner)
        elif not child.name.startswith("_"):
            yield owner, child
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, child)


@cache
def documented_methods(name):
    """The names of the documented methods of the packages' classes of that name, and of their bases."""
    classes = [node for _, node in nodes(PACKAGE_FILES, ast.ClassDef) if node.name == name]
    methods = [each for node in classes for each in node.body if isinstance(each, ast.FunctionDef)]
    own = {each.name for each in methods if ast.get_docstring(each)}
    return own.union(*(documented_methods(base) for node in classes for base in bases(node) - {name}))


def bases(owner):
    """The names of the base classes of a class."""
    return {ast.unparse(base).split("[")[0].split(".")[-1] for base in owner.bases}


def needs_no_docstring(owner, node):
    """True for functions of at most two lines, properties of one statement, and methods that override a documented one.

    The last are also those of an autograd.Function with a docstring.
    """
    if isinstance(node, ast.ClassDef):
        return False
    if node.body[-1].end_lineno - node.body[0].lineno < 2:
        return True
    if owner is None:
        return False
    decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
    if decorators & {"property", "cached_property"}:
        return len(node.body) == 1
    if "Function" in bases(owner):
        return ast.get_docstring(owner) and node.name in {"forward", "backward", "setup_context"}
    return any(node.name in documented_methods(base) for base in bases(owner))


def is_overload(node):
    """True for a signature of typing.overload, whose docstring stands at the implementation."""
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)


def test_public_names_have_docstrings():
    missing = [
        f"{at(path, node)} {node.name}"
        for path in PACKAGE_FILES
        for owner, node in definitions(tree(path))
        if not ast.get_docstring(node) and not needs_no_docstring(owner, node) and not is_overload(node)
    ]
    assert_none(missing)


def test_design_pages_are_not_cited():
    """Sources cite what a reader can find: pages of docs/, papers by section, or the formula itself."""
    files = [path for path in ALL_FILES if path != Path(__file__)]
    found = [(path, number, line) for path in files for number, line in enumerate(path.read_text().splitlines(), 1)]
    assert_none([f"{path.relative_to(ROOT)}:{number}" for path, number, line in found if DESIGN_PAGES.search(line)])


# Annotations


def unannotated(owner, function):
    """The names of a function's arguments without annotation, and "return" if its result has none."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    missing = [each.arg for each in named if each and not each.annotation]
    if owner is not None and missing[:1] in (["self"], ["cls"]):
        del missing[0]
    return missing + ["return"] * (function.returns is None)


def test_public_functions_are_annotated():
    """All arguments and the result of each public function and method. mypy checks what the annotations say."""
    missing = [
        f"{at(path, node)} {node.name}: {', '.join(names)}"
        for path in PACKAGE_FILES
        for owner, node in definitions(tree(path))
        if not isinstance(node, ast.ClassDef) and (names := unannotated(owner, node))
    ]
    assert_none(missing)


# Habits


def test_no_exception_is_swallowed():
    """No handler of all exceptions does nothing."""

    def swallows(handler):
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        broad = any(kind is None or ast.unparse(kind) in {"Exception", "BaseException"} for kind in kinds)
        return broad and all(isinstance(line, ast.Pass) or ast.unparse(line) == "..." for line in handler.body)

    found = nodes(ALL_FILES, ast.ExceptHandler)
    assert_none([at(path, handler) for path, handler in found if swallows(handler)])


def test_nothing_unpickles():
    """Files may come from other people, and unpickling runs code. torch.load with weights_only=True does not."""

    def unpickles(node):
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            return node.module == "pickle" or (node.module == "torch" and "load" in names)
        if isinstance(node, ast.Attribute):
            return ast.unparse(node) in {"pickle.load", "pickle.loads"}
        if ast.unparse(node.func) == "torch.load":
            return "weights_only=True" not in map(ast.unparse, node.keywords)
        return ast.unparse(node.func) == "pickle.Unpickler"  # a subclass with a restricted find_class is allowed

    found = nodes(PACKAGE_FILES, ast.ImportFrom, ast.Attribute, ast.Call)
    assert_none([at(path, node) for path, node in found if unpickles(node)])


def test_nothing_is_named_utils():
    assert_none([path for path in ALL_FILES if "utils" in path.relative_to(ROOT).with_suffix("").parts])


# Tests


def test_names_of_test_files_are_unique():
    """pytest imports each test file by its name alone, and refuses a second file of that name."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert_none([name for name, count in names.items() if count > 1])
