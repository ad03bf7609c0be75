"""Metadata of megatron-ssm, and the build of its C kernels.

The kernels are optional: without a compiler the package is built without them, and PyTorch's operations are used instead.
The build needs only setuptools; torch is needed only to run the code.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from commfabric.native.library import LIBRARY_NAME, digest, skipped, sources  # noqa: E402

REPOSITORY = "https://github.com/megatron-ssm/megatron-ssm"
FLAGS = ["-std=gnu11", "-O3", "-fno-wrapv", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
# Kernels of megatron_ssm may add in any order. Those of sparsefusion may not: their sums over ranks have a fixed order.
OWN_FLAGS = {"commfabric": [], "megatron_ssm": ["-fassociative-math", "-fno-signed-zeros"]}
WIDE, THREADS = "-mprefer-vector-width=512", "-fopenmp"
# Flags to try, the best first: a compiler may lack OpenMP, the flags for x86-64, or function clones for several processors.
ATTEMPTS = ([WIDE, THREADS], [THREADS], ["-DNO_CLONES", THREADS], [], ["-DNO_CLONES"])

# jinja2 before 3.1.6 has ways out of its sandbox, in which chat templates run.
# llguidance before 1.8 repeats a whitespace_pattern without end.
SERVE = ["starlette>=0.40", "uvicorn>=0.30", "pydantic>=2.12", "prometheus-client", "jinja2>=3.1.6", "llguidance>=1.8"]


class BuildKernels(build_ext):
    """Compiles each library with the first of ATTEMPTS that the compiler supports."""

    def build_extensions(self) -> None:
        """Build all libraries; distutils would compile one file after another, here each core compiles one."""
        compile_in_turn = self.compiler.compile

        def compile_at_once(files: list[str], **options) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return sum(pool.map(lambda file: compile_in_turn([file], **options), files), [])

        self.compiler.compile = compile_at_once
        super().build_extensions()

    def build_extension(self, extension: Extension) -> None:
        """Compile with each of ATTEMPTS in turn until one works. Raises the error of the last one if none does."""
        self.force = True  # always rebuild: distutils would not notice that a source file was removed
        for flags in ATTEMPTS:
            extension.extra_compile_args = [*FLAGS, *OWN_FLAGS[extension.name.split(".")[0]], *flags]
            extension.extra_link_args = [flag for flag in flags if flag == THREADS]
            try:
                return super().build_extension(extension)
            except Exception:  # distutils raises errors of several classes
                if flags is ATTEMPTS[-1]:
                    raise

    def get_ext_filename(self, name: str) -> str:
        """`PACKAGE/native/libkernels.so`. The name has no Python version: ctypes loads the library, so one serves all."""
        return str(Path(*name.split(".")[:-1], LIBRARY_NAME))

    def get_export_symbols(self, extension: Extension) -> list[str]:
        """No symbols: a library that ctypes loads needs no PyInit function."""
        return []


class KernelsWheel(bdist_wheel):
    """A wheel for every Python 3: for this platform if it contains the C libraries, otherwise for any platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag of the wheel. It is asked for after the build, when it is known whether the libraries were built."""
        self.root_is_pure = not list(Path(self.bdist_dir).rglob(LIBRARY_NAME))
        *_, platform = super().get_tag()
        return "py3", "none", platform


def kernels(package: str) -> Extension:
    """The C library of a package: `package`/native/libkernels.so."""
    files = [str(path.relative_to(HERE)) for path in sources(package, HERE)]
    macros = [("SOURCES", f'"{digest(package, HERE)}"')]
    return Extension(
        f"{package}.native.libkernels",
        [name for name in files if name.endswith(".c")],
        include_dirs=["commfabric/native"],
        define_macros=macros,
        optional=True,
    )


setup(
    name="megatron-ssm",
    version="0.1.0",  # the only place where the version is written
    description="Tensor parallelism for state-space language models",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    url=REPOSITORY,
    project_urls={
        "Source": REPOSITORY,
        "Documentation": f"{REPOSITORY}/tree/main/docs",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
    keywords=["mamba", "state-space model", "tensor parallelism", "megatron", "deepspeed", "distributed training"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["commfabric*", "sparsefusion*", "attention2d*", "commir*", "megatron_ssm*"]),
    package_data={
        "commfabric": ["py.typed"],
        "sparsefusion": ["py.typed"],
        "attention2d": ["py.typed"],
        "commir": ["py.typed"],
        "megatron_ssm": ["py.typed", "server/page.html"],
    },
    entry_points={
        "console_scripts": [
            "megatron-ssm = megatron_ssm.cli.main:run_and_exit",
            "sparsefusion = sparsefusion.cli.commands:main",
        ],
        "lm_eval.models": ["megatron-ssm = megatron_ssm.integrations.lm_eval:MegatronSsmLM"],
    },
    # An editable install then puts this directory on the path, so packages that are added later are found too.
    package_dir={"": "."},
    ext_modules=[] if skipped() else [kernels("commfabric"), kernels("megatron_ssm")],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": KernelsWheel},
    install_requires=[
        "torch>=2.6",
        "numpy",
        "packaging",
        "safetensors",
        "tokenizers",
        "PyYAML",
        "tqdm",
        "megatron-core>=0.16,<0.17",  # the version that is tested; 0.18 needs triton to be imported
    ],
    extras_require={
        "deepspeed": ["deepspeed>=0.19.8"],
        "hf": ["transformers"],
        "grammar": ["llguidance>=1.8"],
        "eval": ["lm-eval>=0.4.12", "transformers"],  # before it, every rank of torchrun writes the results
        "log": ["tensorboard", "wandb"],
        "peers": ["llama-cpp-python[server]", "gguf"],
        "peft": ["peft"],
        "serve": SERVE,
        "test": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "transformers",
            "peft",
            "deepspeed>=0.19.8",
            "tensorboard",
            "wandb",
            "httpx",
            "openai",
            "playwright",
            *SERVE,
        ],
        "lint": ["ruff", "mypy", "pre-commit"],
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10", "mkdocstrings[python]>=1.0,<2", "ruff"],
        "bench": ["transformers", "matplotlib", "httpx"],
        "report": ["matplotlib"],
        # Both compile against the installed torch and need nvcc: pip install --no-build-isolation '.[cuda]'
        # mamba-ssm before 2.3.2 has 32-bit offsets in the selective scan.
        "cuda": ["mamba-ssm>=2.3.2", "causal-conv1d>=1.4", "flash-linear-attention>=0.6"],
    },
)
