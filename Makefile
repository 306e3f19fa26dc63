# `make demo` and `make test` need python3 (3.10 or newer) and make; tools/setup_env.py finds or makes the rest.
PYTHON ?= python3
ARGS ?=

# The project's sources are used as they lie here, not an installed copy.
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: demo test lint bench-cpu figures clean

demo:
	@py=$$($(PYTHON) tools/setup_env.py demo) && "$$py" -m msa_ops demo $(ARGS)

# One torch thread per worker: two workers on two cores.
test: lint
	@py=$$($(PYTHON) tools/setup_env.py dev) && OMP_NUM_THREADS=1 "$$py" -m pytest -n 2 $(ARGS)

lint:
	@py=$$($(PYTHON) tools/setup_env.py dev) && "$$py" -m ruff check . && "$$py" -m mypy

bench-cpu:
	@py=$$($(PYTHON) tools/setup_env.py demo) && "$$py" benchmarks/cpu.py $(ARGS)

# What README.md and docs/ say of measurements and support, from benchmarks/results/ and the code.
figures:
	@py=$$($(PYTHON) tools/setup_env.py demo) && "$$py" benchmarks/figures.py $(ARGS)

clean:
	rm -rf .venv demo-out bench-out dist build .pytest_cache .hypothesis .mypy_cache .ruff_cache
