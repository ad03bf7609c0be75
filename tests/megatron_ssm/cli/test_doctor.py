"""`python -m megatron_ssm doctor` as a process. Oracles: importlib.metadata's versions, files put where it looks."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import torch

from megatron_ssm.cli import doctor
from megatron_ssm.kernels import cuda_kernels, fused_adam, kernels, products
from megatron_ssm.kernels.optional_imports import OptionalImport
from megatron_ssm.kernels.report import kernels_line

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    "torch numpy safetensors tokenizers transformers megatron-core deepspeed mamba-ssm causal-conv1d transformer-engine apex"
).split()
HOUR = 3600


def run(*flags, root=ROOT, **environment):
    """What the doctor prints; it always succeeds, and says nothing else."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(v) for name, v in environment.items()}}
    command = [sys.executable, "-m", "megatron_ssm", "doctor", *flags]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=30)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


healthy = cache(run)  # as this machine is


def installed(package):
    """The version, or that there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def unwrapped(page):
    """The page with each entry on one line; continued lines begin with more spaces than an entry."""
    return re.sub(r"\n {4,}(?=\S)", " ", page)


def lines_of(page, *words):
    """The page's entries of these words, however far apart."""
    pattern = " +".join(re.escape(str(word)) for word in words if word)
    return re.findall(rf"^ *{pattern}$", unwrapped(page), re.MULTILINE)


def apex(directory, version="0.9.8.dev0", optimizers=()):
    """A distribution with this name; returns the folder to be put on the path."""
    about, package = directory / f"apex-{version}.dist-info", directory / "apex"
    for folder in (about, package / "optimizers"):
        folder.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: apex\nVersion: {version}\n")
    for path in (package / "__init__.py", *(package / "optimizers" / name for name in optimizers)):
        path.write_text("raise SystemExit('the doctor must not run this')\n")
    return directory


def lock(path, age=0):
    """An extension's build lock of so many seconds."""
    path.parent.mkdir(parents=True)
    path.touch()
    os.utime(path, (time.time() - age,) * 2)
    return path


@pytest.mark.parametrize("package", PACKAGES)
def test_versions(package):
    assert json.loads(healthy("--json"))["versions"][package] == installed(package)
    assert len(lines_of(healthy(), package, installed(package))) == 1


def test_the_page_and_the_json_say_the_same():
    page, text = healthy(), healthy("--json")
    found = json.loads(text)
    assert list(found) == ["versions", "kernels", "operations", "launchers", "threads", "warnings"]
    assert text.count("\n") == 1 and text.isascii()
    for part in ("versions", "launchers", "threads"):
        assert all(lines_of(page, name, value) for name, value in found[part].items()), part
    assert len(found["operations"]) >= 11
    for row in found["operations"]:
        name = row["operation"] + f", {row['device']}" * (row["device"] != "cpu")
        (line,) = re.findall(rf"^  {re.escape(name)}  .*$", unwrapped(page), re.MULTILINE)
        assert all(row[part] in line for part in ("inference", "training", "why")), row
    assert all(lines_of(page, line) for line in found["warnings"] or ["none"])
    for package, library in found["kernels"].items():
        line = rf"^  {package} +(C|torch) \(.*{re.escape(library['file'] or '')}$"
        assert re.search(line, unwrapped(page), re.MULTILINE)


def test_each_operation_has_one_row_on_this_machine():
    rows = json.loads(healthy("--json"))["operations"]
    names = [row["operation"] for row in rows if row["device"] == "cpu"]
    assert len(set(names)) == len(names) == 13
    runs = {row["operation"]: row["inference"] for row in rows if row["device"] == "cpu"}
    native = bool(kernels.LIBRARY)
    assert runs["selective scan"] == ("C" if native else "torch")
    for name, dtype in (("float32", torch.float32), ("int8", torch.int8), ("int4", torch.uint8)):
        first, most = next(iter(products.kernels_for(dtype, torch.float32).items()), (None, 0))
        assert runs[f"matrix product, {name}"].startswith(
            f"C ({first}) up to {most} rows, then " if native else "torch"
        )
    assert runs["matrix product, float16"] == "torch"
    assert all(row["why"] for row in rows)


def with_kernels(monkeypatch, adams=(), **whys):
    """Pretend that all CUDA kernels are installed, but those for which a reason is given; adams: the FusedAdams."""
    packages = {name: package for name, (package, _) in cuda_kernels.KERNELS.items()}
    kernels = {
        name: OptionalImport(package, not whys.get(name), whys.get(name, "")) for name, package in packages.items()
    }
    monkeypatch.setattr(cuda_kernels, "load_kernel", kernels.__getitem__)
    monkeypatch.setattr(fused_adam, "fused_adams", lambda: adams)


def on_cuda():
    """{operation: (inference, training, why)}"""
    rows = doctor.operations_on("cuda")
    assert [row["operation"] for row in rows] == [row["operation"] for row in doctor.operations_on("cpu")]
    assert {row["device"] for row in rows} == {"cuda"} and all(row["why"] for row in rows)
    return {row["operation"]: (row["inference"], row["training"], row["why"]) for row in rows}


NO_MAMBA, NO_CONV = "mamba-ssm is not installed", "causal-conv1d cannot be used (ImportError: undefined symbol)"
NO_FLA = "flash-linear-attention is not installed"
WHYS = {"mamba-ssm": NO_MAMBA, "flash-linear-attention": NO_FLA, "causal-conv1d": NO_CONV}
NOTHING = {name: WHYS[package] for name, (package, _) in cuda_kernels.KERNELS.items()}
NO_TE, NO_APEX = (
    OptionalImport(package, why=f"{package} is not installed") for package in ("transformer-engine", "apex")
)


def test_on_cuda_without_optional_kernels_torch_does_everything(monkeypatch):
    with_kernels(monkeypatch, (NO_TE, NO_APEX), **NOTHING)
    rows = on_cuda()
    assert rows.pop("all-reduce between ranks")[:2] == ("NCCL", "NCCL")
    assert rows.pop("AdamW")[1:] == ("torch", "transformer-engine is not installed; apex is not installed")
    for format in ("int8", "int4"):
        assert rows.pop(f"matrix product, {format}")[:2] == ("torch", "none: quantized matrices are not trained")
    assert {row[:2] for row in rows.values()} == {("torch", "torch")}
    assert rows["selective scan"][2] == rows["SSD"][2] == NO_MAMBA and rows["convolution"][2] == NO_CONV
    line = kernels_line("cuda:1", torch.float32, "NCCL")
    assert line == f"megatron-ssm: kernels torch (cuda; {NO_MAMBA}; {NO_FLA}; {NO_CONV}); all-reduce NCCL"
    line = kernels_line("cuda", torch.float32, trains=True)
    assert line.endswith("; AdamW torch (transformer-engine is not installed; apex is not installed)")


def test_on_cuda_with_all_optional_kernels(monkeypatch):
    with_kernels(monkeypatch, (NO_TE, OptionalImport("apex", object())))
    rows = on_cuda()
    assert rows["selective scan"][:2] == rows["SSD"][:2] == ("mamba-ssm", "mamba-ssm")
    assert (
        rows["convolution"][:2] == ("causal-conv1d", "causal-conv1d")
        and "taps other than 2 to 4" in rows["convolution"][2]
    )
    assert rows["AdamW"][1:] == (f"apex {installed('apex')}", "transformer-engine is not installed")
    packages = [f"{package} {installed(package)}" for package in WHYS]
    assert kernels_line("cuda", torch.bfloat16) == f"megatron-ssm: kernels {', '.join(packages)}"
    line = kernels_line("cuda", torch.float64, trains=True)
    assert line.startswith(
        "megatron-ssm: kernels torch (cuda; no other kernels take float64); AdamW torch (FusedAdam has no"
    )


def test_on_cuda_with_some_optional_kernels(monkeypatch):
    """mamba-ssm without its compiled part has what Triton compiles."""
    why = "mamba-ssm cannot be used (ImportError: it was built without selective_scan_cuda)"
    with_kernels(monkeypatch, (OptionalImport("transformer-engine", object()),), selective_scan_fn=why)
    rows = on_cuda()
    assert rows["selective scan"] == ("mamba-ssm (one token), torch", "torch", why)
    assert rows["SSD"][:2] == ("mamba-ssm", "mamba-ssm")
    assert rows["AdamW"][1] == f"transformer-engine {installed('transformer-engine')}"
    line = kernels_line("cuda", "bfloat16")
    complete = ", ".join(f"{package} {installed(package)}" for package in WHYS if package != "mamba-ssm")
    assert line == f"megatron-ssm: kernels {complete}, torch (cuda; {why})"


@pytest.fixture(scope="module")
def harmed(tmp_path_factory):
    """The page of a machine on which much is wrong, and its directory."""
    directory = tmp_path_factory.mktemp("harmed")
    lock(directory / "extensions/old/lock", HOUR)
    lock(directory / "extensions/py311_cu130/deep/lock", HOUR)
    lock(directory / "extensions/new/lock")
    settings = dict(OMP_NUM_THREADS=4096, MEGATRON_SSM_SKIP_NATIVE=1, TORCH_EXTENSIONS_DIR=directory / "extensions")
    return run(PYTHONPATH=apex(directory / "site"), **settings), directory


@pytest.mark.full
def test_an_apex_that_is_not_nvidias(harmed):
    page, directory = harmed
    line = rf"^  apex 0\.9\.8\.dev0 \({directory}/site/apex\) is not NVIDIA's: `pip uninstall apex`; .*NVIDIA/apex`$"
    assert re.search(line, unwrapped(page), re.MULTILINE)


def test_old_locks_but_not_new_ones(harmed):
    page, directory = harmed
    named = re.findall(
        rf"^  {directory}/extensions/(\S+) is 60 minutes old, .*delete it", unwrapped(page), re.MULTILINE
    )
    assert named == ["old/lock", "py311_cu130/deep/lock"]


def test_more_threads_than_cores(harmed):
    assert re.search(
        r"^  OMP_NUM_THREADS=4096 is more than the \d+ cores .* set it to", unwrapped(harmed[0]), re.MULTILINE
    )


def test_without_kernels_it_says_torch_and_why(harmed):
    page, _ = harmed
    for package in ("commfabric", "megatron_ssm"):
        assert re.search(rf"^  {package} +torch \(MEGATRON_SSM_SKIP_NATIVE is set\)", page, re.MULTILINE)
    assert lines_of(page, "selective scan", "torch; training: torch (MEGATRON_SSM_SKIP_NATIVE is set)")
    assert lines_of(
        page, "all-reduce between ranks", "gloo; training: gloo (no C kernels: MEGATRON_SSM_SKIP_NATIVE is set)"
    )
    assert "  MEGATRON_SSM_SKIP_NATIVE is set, so torch" in page and "reinstall" not in page


def unbuilt(directory):
    """A copy of the packages without their C libraries, beside a torch that cannot be imported."""
    for package in ("commfabric", "megatron_ssm"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (directory / "torch.py").write_text("raise ImportError('libc10.so:\\ncannot open')\n")
    return directory


@pytest.mark.parametrize(
    "compiler,remedy", [(shlex.quote(sys.executable), "reinstall with"), ("no-compiler", "install gcc, then")]
)
def test_a_broken_torch_and_no_kernels(compiler, remedy, tmp_path):
    """What cannot be found out is told with its reason, and the rest all the same. This apex is like NVIDIA's."""
    path = apex(unbuilt(tmp_path), optimizers=["__init__.py", "fused_adam.py"])
    settings = dict(PYTHONPATH=path, CC=compiler, TORCH_EXTENSIONS_DIR=path / "none", MEGATRON_SSM_SKIP_NATIVE="")
    found = json.loads(run("--json", root=path, **settings))
    unknown = "unknown (ImportError: libc10.so: cannot open)"
    assert found["versions"]["torch build"] == found["operations"] == found["threads"]["torch"] == unknown
    assert found["versions"]["numpy"] == installed("numpy")
    why = "not built: it needs a C compiler when the package is installed"
    for package, library in found["kernels"].items():
        assert library == {"loaded": False, "variant": "", "file": None, "why not": why}
        assert [line for line in found["warnings"] if line.startswith(f"{package} has no C kernels ({why}): {remedy}")]
    assert not [line for line in found["warnings"] if re.search("apex|lock|unknown", line)]
    page = run(root=path, **settings)
    assert unknown in unwrapped(page)
    # What is not known counts as a problem: torch's build, the operations, and torch's threads.
    assert page.endswith(f"\n\n{len(found['warnings']) + 3} problems, listed above.\n")


def test_the_page_fits_80_columns_and_ends_in_a_verdict(harmed):
    for page in (healthy(), harmed[0]):
        assert all(len(line) <= 80 or len(line.split()) == 1 for line in page.splitlines())  # or one long path
        _, warnings, verdict = re.split(r"^Warnings\n|\n\n(?=.*\n\Z)", unwrapped(page), flags=re.MULTILINE)
        count = 0 if warnings == "  none" else warnings.count("\n") + 1
        known = f"{count} problem{'s' * (count > 1)}, listed above."
        assert verdict == (known if count else "No problems found.") + "\n"


@pytest.mark.parametrize("threads,lines", [("", 0), ("1", 0), ("1,4", 0), ("many", 1), ("4096,1", 1)])
def test_omp_num_threads(threads, lines, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert len(doctor.omp_threads()) == lines


def test_an_apex_that_is_only_a_folder(tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    (line,) = doctor.foreign_apex()
    assert line.startswith(f"apex ({tmp_path}/apex) is not NVIDIA's: take it off sys.path")


def test_a_cpu_build_of_torch_beside_a_gpu():
    (line,) = doctor.cpu_torch_beside(["/dev/nvidia0"], "CPU")
    assert "/dev/nvidia0" in line and "install one for CUDA" in line
    assert not doctor.cpu_torch_beside([], "CPU")
    assert not doctor.cpu_torch_beside(["/dev/nvidia0"], "CUDA 13.0; devices: none")


def test_kernels_of_a_compiler_without_function_clones():
    (line,) = doctor.slow_kernels_on({"sse2", "avx2"}, {"megatron_ssm": "SSE2", "commfabric": "AVX2"})
    assert line.startswith("megatron_ssm's C kernels use SSE2, but this processor has AVX2: reinstall with GCC 12")
    assert not doctor.slow_kernels_on({"sse2"}, {"megatron_ssm": "SSE2"})
    assert not doctor.slow_kernels_on({"avx2"}, {"megatron_ssm": "", "commfabric": "AVX-512"})


def test_shared_memory_that_is_missing_or_small(tmp_path):
    (line,) = doctor.shared_memory(tmp_path / "none")
    assert f"{tmp_path}/none is missing" in line
    (line,) = doctor.shared_memory(tmp_path, needed=2**62)
    assert f"MB free, of {2**42} needed" in line
    assert doctor.shared_memory(tmp_path, needed=0) == []


def test_the_line_of_a_job():
    native = f"C ({kernels.LIBRARY.variant})" if kernels.LIBRARY else f"torch ({kernels.LIBRARY.why})"
    assert kernels_line(torch.device("cpu"), torch.bfloat16) == f"megatron-ssm: kernels {native}"
    line = kernels_line("cpu", "float32", "shared memory")
    assert line == f"megatron-ssm: kernels {native}; all-reduce shared memory"
    assert kernels_line("cpu", "float32", trains=True) == f"megatron-ssm: kernels {native}"
    assert kernels_line("cpu", torch.float64) == "megatron-ssm: kernels torch (float64)"
