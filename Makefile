# `make demo` and `make test` are enough on a fresh machine with Python, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-triton test-vllm lint types clean

demo: $(VENV)/.installed
	$(BIN)/vitgraph demo

test: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest tests

test-triton: $(VENV)/.installed
	VITGRAPH_TRITON_RELEASES=all $(BIN)/python -m pytest tests/test_compile.py

test-vllm: $(VENV)/.installed
	$(BIN)/python tests/vllm_releases.py

lint: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed
	$(BIN)/mypy encoder graphs

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[test]' ruff
	touch $@

clean:
	rm -rf $(VENV)
