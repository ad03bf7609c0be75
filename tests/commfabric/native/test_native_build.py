"""Building the C libraries in a copy of the sources; oracle: the files built, and what native.Library says of them."""

import os
import shutil
import subprocess
import sys

import pytest
from chosen import by_default

from commfabric.native.library import sources
from native_variants import ROOT, build_ext, compiler, libraries

PACKAGES = ("megatron_ssm", "commfabric")
OTHER = "torch ({} was not built from the C files next to it: install the package again)"
MISSING = ("-U__linux__ -DNO_INTRINSICS", "-U__linux__", "-DNO_INTRINSICS")
needs_compiler = pytest.mark.skipif(not shutil.which(compiler()), reason="no C compiler")


@pytest.fixture
def copy(tmp_path):
    """A copy of the sources without libraries, in a folder with a space in its name."""
    folder = tmp_path / "a copy"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(copy, **environment):
    """(output of build_ext --inplace, libraries that exist afterwards)."""
    # Without clones, which are copies of the kernels for several kinds of processors, the build takes a third of the time.
    settings = dict(MEGATRON_SSM_SKIP_NATIVE=None, CFLAGS="-g0 -DNO_CLONES") | environment
    return build_ext("--inplace", root=copy, **settings), libraries(copy)


def kernels_of(copy, package, **environment):
    """The text of native.Library, imported from the copy, about a package's kernels."""
    program = f"from commfabric.native.library import Library; print(Library({package!r}, {{}}))"
    environment = {"MEGATRON_SSM_SKIP_NATIVE": "", **environment}
    command = [sys.executable, "-c", program]
    return subprocess.check_output(command, cwd=copy, env={**os.environ, **environment}, text=True).strip()


@needs_compiler
@pytest.mark.parametrize("package", PACKAGES)
def test_without_intrinsics(package):
    """As on processors other than x86's, and by old compilers. Every file compiles, and warns of nothing undeclared."""
    files = [file for file in sources(package) if file.suffix == ".c"]
    folders = [f"-I{ROOT / name / 'native'}" for name in PACKAGES]
    command = [
        compiler(),
        "-std=gnu11",
        "-fsyntax-only",
        "-Werror=implicit",
        "-DNO_INTRINSICS",
        "-DSOURCES=0",
        *folders,
    ]
    assert files and not subprocess.run([*command, *files], capture_output=True, text=True).stderr


@needs_compiler
@pytest.mark.parametrize("options", by_default(("-U__linux__ -DNO_INTRINSICS",), MISSING))
@pytest.mark.parametrize("package", PACKAGES)
def test_no_function_is_missing(package, options, tmp_path):
    """The library can be linked on systems without AMX and on processors other than x86's."""
    files = [file for file in sources(package) if file.suffix == ".c"]
    folders = [f"-I{ROOT / name / 'native'}" for name in PACKAGES]
    flags = ["-std=gnu11", "-O0", "-w", "-fPIC", "-shared", "-Wl,--no-undefined", "-DSOURCES=0", "-DNO_CLONES"]
    command = [compiler(), *flags, *options.split(), *folders, *files, "-lm", "-o", tmp_path / "libkernels.so"]
    assert files and not subprocess.run(command, capture_output=True, text=True).stderr


def test_without_a_compiler(copy):
    """The build reports it and succeeds, without a library."""
    output, built = build(copy, CC="/nonexistent")
    for package in PACKAGES:
        assert f'building extension "{package}.native.libkernels" failed' in output
        assert kernels_of(copy, package) == "torch (not built: it needs a C compiler when the package is installed)"
    assert not built


def test_skipped(copy):
    """Nothing is built, and an existing library is not loaded."""
    _, built = build(copy, MEGATRON_SSM_SKIP_NATIVE="1")
    assert not built
    (copy / "megatron_ssm/native/libkernels.so").touch()
    assert kernels_of(copy, "megatron_ssm", MEGATRON_SSM_SKIP_NATIVE="1") == "torch (MEGATRON_SSM_SKIP_NATIVE is set)"


@needs_compiler
def test_files_that_are_not_our_library(copy):
    """A text file, and a shared library without our functions."""
    path = copy / "megatron_ssm/native/libkernels.so"
    path.write_text("no library")
    assert kernels_of(copy, "megatron_ssm").startswith(f"torch ({path}: ")
    subprocess.run([compiler(), "-shared", "-o", path, "-x", "c", os.devnull], check=True)
    assert kernels_of(copy, "megatron_ssm") == f"torch ({path}: undefined symbol: native_sources)"


@needs_compiler
@pytest.mark.full
def test_both_are_built_and_built_again_after_a_change(copy):
    """A deleted source file counts as a change, too; distutils alone would not notice it."""
    _, built = build(copy, CFLAGS=None)
    assert sorted(built) == [*PACKAGES]
    assert all(kernels_of(copy, package).startswith("C, ") for package in PACKAGES)
    with open(copy / "megatron_ssm/native/elementary.h", "a") as header:
        header.write("/* changed */\n")
    assert kernels_of(copy, "megatron_ssm") == OTHER.format(built["megatron_ssm"].name)
    build(copy, CC="/nonexistent")  # fails, and leaves the old library in place
    assert kernels_of(copy, "megatron_ssm") == OTHER.format(built["megatron_ssm"].name)
    more = copy / "megatron_ssm/native/more.c"
    more.write_text("int more(void) { return 0; }\n")
    build(copy)
    assert kernels_of(copy, "megatron_ssm").startswith("C, ")
    more.unlink()
    build(copy)
    assert kernels_of(copy, "megatron_ssm").startswith("C, ")
