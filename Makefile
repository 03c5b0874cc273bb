# `make demo` and `make test` are enough on a fresh machine with Python, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The packages as a type checker finds them: it cannot see setuptools' import hooks.
LINKS := $(addprefix build/types/vitgraph/,kernels encoder graphs bench)

# As in CI: neither the repository's root nor a script's folder is on sys.path, nothing asks a model hub.
test test-triton: export PYTHONSAFEPATH := 1
test test-triton: export HF_HUB_OFFLINE := 1
# Two files of tests at a time, one thread each.
test: export OMP_NUM_THREADS := 1

.PHONY: demo test test-triton test-vllm test-sglang lint types clean

demo: $(VENV)/.installed
	$(BIN)/vitgraph demo

test: $(VENV)/.installed $(LINKS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests -n 2 --dist loadfile

test-triton: $(VENV)/.installed
	VITGRAPH_TRITON_RELEASES=all $(BIN)/python -m pytest tests/test_compile.py

test-vllm: $(VENV)/.installed
	$(BIN)/python tests/vllm_releases.py

test-sglang: $(VENV)/.installed
	$(BIN)/python tests/sglang_releases.py

lint: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed $(LINKS)
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[test]' ruff mypy
	touch $@

$(LINKS):
	mkdir -p $(@D)
	ln -s ../../../$(@F) $@

clean:
	rm -rf $(VENV) build
