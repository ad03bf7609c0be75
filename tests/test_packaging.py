"""The wheel, built and installed into a clean environment. Oracle: pip, and the output of the installed commands."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from native_variants import CPUINFO, compiler

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("commfabric", "sparsefusion", "attention2d", "commir", "megatron_ssm")
LIBRARIES = {"commfabric/native/libkernels.so", "megatron_ssm/native/libkernels.so"}
NO_COMPILER = "/nonexistent"


@pytest.fixture
def sources(tmp_path):
    """A folder with the files from which a wheel is built, without libraries that were built before."""
    folder = tmp_path / "sources"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build_wheel(sources: Path, **environment: str) -> Path:
    """The wheel that pip builds. It uses no network: the build needs only setuptools, which is installed."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    environment = {**os.environ, "MEGATRON_SSM_SKIP_NATIVE": "", "CFLAGS": "-g0 -DNO_CLONES", **environment}
    subprocess.run(command, cwd=sources, env=environment, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = (sources / "dist").iterdir()
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """The folder of commands of a new environment with the wheel, which finds its dependencies in this environment."""
    venv.create(folder, symlinks=True)
    # A .pth file adds this environment's packages, but ignores the .pth files among them, such as the one of this checkout.
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--ignore-installed", wheel], check=True)
    return python.parent


def output(*command: object, cwd: Path) -> str:
    """The output of a command that runs in `cwd`, without the checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["MEGATRON_SSM_SKIP_NATIVE"] = ""
    return subprocess.check_output(list(map(str, command)), cwd=cwd, env=environment, text=True)


@pytest.mark.parametrize("cc", [compiler(), pytest.param(NO_COMPILER, marks=pytest.mark.full)])
def test_wheel_in_a_clean_environment(sources, tmp_path, cc):
    """With a compiler the wheel has the C libraries and this platform's tag; without one it has neither and uses torch."""
    if cc != NO_COMPILER and not shutil.which(cc):
        pytest.skip("no C compiler")
    hasty = tmp_path / "cc"  # setup.py's -O3 is replaced by the last -O, which compiles in a quarter of the time
    hasty.write_text(f'#!/bin/sh\nexec {cc} "$@" -O0\n')
    hasty.chmod(0o755)
    wheel = build_wheel(sources, CC=str(hasty))
    names = set(zipfile.ZipFile(wheel).namelist())
    has_libraries = cc != NO_COMPILER
    assert names & LIBRARIES == (LIBRARIES if has_libraries else set())
    platform = re.sub(r"\W", "_", sysconfig.get_platform()) if has_libraries else "any"
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    assert {f"{package}/py.typed" for package in PACKAGES} | {"megatron_ssm/server/page.html"} <= names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)

    with zipfile.ZipFile(wheel) as archive:
        (points,) = (archive.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
    assert "[lm_eval.models]\nmegatron-ssm = megatron_ssm.integrations.lm_eval:MegatronSsmLM\n" in points

    commands = install(wheel, tmp_path / "environment")
    doctor = json.loads(output(commands / "megatron-ssm", "doctor", "--json", cwd=tmp_path))
    assert [library["loaded"] for library in doctor["kernels"].values()] == [has_libraries] * 2, doctor["kernels"]
    # Built without function clones, loops are for the oldest processors; products use what this one has.
    is_slower = has_libraries and CPUINFO.exists() and "avx2" in CPUINFO.read_text().split()
    assert len([line for line in doctor["warnings"] if "but this processor has AVX2" in line]) == 2 * is_slower
    program = "from megatron_ssm.kernels import products; print(products.instructions() != products.INSTRUCTIONS[0])"
    assert output(commands / "python", "-c", program, cwd=tmp_path).strip() == str(is_slower)
    for package in PACKAGES:
        where = output(commands / "python", "-c", f"import {package}; print({package}.__file__)", cwd=tmp_path)
        assert where.startswith(str(tmp_path))
    assert "usage: sparsefusion" in output(commands / "sparsefusion", "--help", cwd=tmp_path)


def test_version_number_is_written_once():
    (version,) = re.findall(r'version="(\d+\.\d+\.\d+)"', (ROOT / "setup.py").read_text())
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert not [path for path in files if version in path.read_text()]
