"""Metadata of megatron-ssm. The build itself needs nothing but setuptools: torch is what the code runs on."""

from setuptools import find_packages, setup

setup(
    name="megatron-ssm",
    version="0.1.0",
    description="Tensor parallelism for state-space language models",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["sparsefusion*", "attention2d*", "commir*", "megatron_ssm*"]),
    # With this an editable install puts the directory itself on the path, so that a package added later is found.
    package_dir={"": "."},
    install_requires=[
        "torch>=2.6",
        "numpy",
        "packaging",
        "safetensors",
        "tokenizers",
        "PyYAML",
        "tqdm",
        "megatron-core>=0.16,<0.21",
    ],
    extras_require={
        "deepspeed": ["deepspeed>=0.16"],
        "hf": ["transformers"],
        "test": ["pytest", "pytest-xdist", "hypothesis", "transformers"],
        "lint": ["ruff"],
        "bench": ["transformers", "matplotlib"],
        "report": ["matplotlib"],
        # Both compile against the installed torch and need nvcc: pip install --no-build-isolation '.[cuda]'
        "cuda": ["mamba-ssm>=2.2", "causal-conv1d>=1.4"],
    },
)
