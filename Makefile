# Everything runs in .venv. `make env` creates it, and every other target updates it first if it is out of date.

TORCH ?= torch==2.13.0
# A package index that is used for torch only, for instance one with CPU builds.
TORCH_INDEX ?=

PYTHON := .venv/bin/python
# Two tests at a time, also on few cores: the ranks of a test wait for one another more than they compute.
WORKERS := -n 2 --dist worksteal
# The tests to run (files, or options of pytest); all if empty.
TESTS ?=
# One pip at a time: torch brings another setuptools. Its progress bars need its whole output. Python compiles what it
# imports, at the first import; pip would compile everything, which takes longer than the rest of the installation.
PIP_INSTALL := $(PYTHON) -m pip install --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
BENCHMARKS := $(filter-out benchmarks/support/%,$(sort $(wildcard benchmarks/*/*.py)))

.PHONY: env demo test test-all lint docs bench
.DELETE_ON_ERROR:

env: .venv/stamp
	@cat .venv/stamp

# The library with its server.
.venv/library: setup.py pyproject.toml Makefile $(wildcard */native/*.[ch])
	@test -x .venv/bin/pip || \
	    $$(python3.11 -c 'import ensurepip' 2>/dev/null && echo python3.11 || echo python3) -m venv .venv
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "env: needs Python 3.10 or newer")'
ifeq ($(TORCH_INDEX),)
	@echo "env: installing $(TORCH) into .venv from pip's own index, usually with CUDA: 2.7 GB to download, 5 GB on disk."
	@echo "env: For the build without CUDA, 0.2 GB and 1 GB, press Ctrl-C and run:"
	@echo "env:     make $(or $(MAKECMDGOALS),env) TORCH_INDEX=https://download.pytorch.org/whl/cpu"
else
	@echo "env: installing $(TORCH) into .venv from $(TORCH_INDEX)"
endif
	@$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	@$(PYTHON) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > .venv/constraints.txt
	@echo "env: installing megatron-ssm, whose C kernels are compiled now if there is a C compiler (half a minute)"
	@$(PIP_INSTALL) -c .venv/constraints.txt -e '.[hf,serve]'
	@ls */native/libkernels.so > /dev/null 2>&1 || echo "env: the C kernels were not compiled, and PyTorch does the same more \
	slowly. Is there a C compiler (sudo apt install gcc)? With one, make -B $(or $(MAKECMDGOALS),env) compiles them."
	@touch $@

# And what tests, checks, the site and benchmarks need. The stamp contains the line that `make env` prints.
.venv/stamp: .venv/library
	@echo "env: installing what tests and checks need (about a minute)"
	@$(PIP_INSTALL) -c .venv/constraints.txt 'megatron-ssm[test,lint,docs,bench]'
	@echo "env: $$(cat .venv/constraints.txt), .venv has $$(du -sm .venv | cut -f1) MB" > $@

demo: .venv/library
	@$(PYTHON) examples/demo.py

test: .venv/stamp
	@$(PYTHON) -m pytest -q $(WORKERS) $(TESTS)

test-all: .venv/stamp
	@$(PYTHON) -m pytest -q $(WORKERS) --full $(TESTS)

lint: .venv/stamp
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check --quiet .
	@$(PYTHON) -m mypy

# Builds the site into build/site, and says how to read it.
docs: .venv/stamp
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet
	@echo "docs: the site is in build/site. Open build/site/index.html in a browser; for its search, run"
	@echo "docs:     $(PYTHON) -m http.server -d build/site    # and open http://127.0.0.1:8000"

# The first line of a benchmark is the beginning of its docstring and says "about N min".
bench: .venv/stamp
	@awk 'FNR == 1 { gsub(/"""/, ""); print FILENAME ": " $$0; \
	                 if (match($$0, /about [0-9]+ min/)) minutes += substr($$0, RSTART + 6) } \
	      END { print "bench: about " minutes + 0 " min in all" }' $(BENCHMARKS) < /dev/null
	@set -e; for file in $(BENCHMARKS); do \
	    echo; echo "== $$file"; \
	    if head -1 "$$file" | grep -q "root" && ! { [ "$$(id -u)" = 0 ] && command -v ip >/dev/null; }; then \
	        echo "skipped: it needs root and iproute2 (ip, tc)"; continue; \
	    fi; \
	    $(PYTHON) "$$file"; \
	done
