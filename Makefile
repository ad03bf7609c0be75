# Everything runs in .venv. `make env` creates it, and every other target updates it first if it is out of date.

TORCH ?= torch==2.13.0
# A package index that is used for torch only, for instance one with CPU builds.
TORCH_INDEX ?=

PYTHON := .venv/bin/python
# Two tests at a time, also on few cores: the ranks of a test wait for one another more than they compute.
WORKERS := -n 2 --dist worksteal
# The tests to run (files, or options of pytest); all if empty.
TESTS ?=
# -qq shows only errors: pip's warnings are about its own configuration. Python compiles what it imports, at the first
# import; pip would compile everything, which takes longer than the rest of the installation.
PIP_INSTALL := $(PYTHON) -m pip install -qq --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
BENCHMARKS := $(filter-out benchmarks/support/%,$(sort $(wildcard benchmarks/*/*.py)))

.PHONY: env demo test test-all lint docs bench
.DELETE_ON_ERROR:

env: .venv/stamp
	@cat .venv/stamp

# The library with its server. The C kernels are compiled while torch is downloaded.
.venv/library: setup.py pyproject.toml Makefile $(wildcard */native/*.[ch])
	@echo "env: installing $(TORCH) and megatron-ssm into .venv (one to three minutes, without a sign of progress)"
	@test -x .venv/bin/pip || \
	    $$(python3.11 -c 'import ensurepip' 2>/dev/null && echo python3.11 || echo python3) -m venv .venv
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "env: needs Python 3.10 or newer")'
	@$(PIP_INSTALL) --no-deps -e . & compiled=$$!; trap "kill $$compiled" INT TERM; \
	    $(PIP_INSTALL) --no-warn-conflicts $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"; torch=$$?; \
	    wait $$compiled && exit $$torch
	@$(PYTHON) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > .venv/constraints.txt
	@$(PIP_INSTALL) -c .venv/constraints.txt 'megatron-ssm[hf,serve]'
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

# Builds the site into build/site.
docs: .venv/stamp
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

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
