# Every target sets up .venv by itself; the stamp file makes that free when nothing changed.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
TORCH ?= torch==2.13.0

.PHONY: help demo test lint types bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "%-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet $(TORCH)
	$(VENV)/bin/pip install --quiet -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)  ## answer the demo prompts with the bundled checkpoint on a local Ray cluster
	rm -f out/demo.jsonl out/demo.jsonl.journal
	$(VENV)/bin/headrace batch configs/local.yaml --input configs/demo/prompts.jsonl --output out/demo.jsonl

test: $(STAMP)  ## run the tests
	$(VENV)/bin/pytest

lint: $(STAMP)  ## check style and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(STAMP)  ## check types
	$(VENV)/bin/pyright

bench: $(STAMP)  ## measure how fast a handoff crosses, beside memcpy and the Ray object store
	$(VENV)/bin/headrace bench transfer

clean:  ## remove everything that is built, the virtual environment included
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
