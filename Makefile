# Each target makes what it needs, on a fresh machine too. PYTHON chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench clean

# A daemon, a real little training, three destinations, the account. No accounts, no torch, under three minutes.
demo: $(VENV)/demo.done
	$(BIN)/verl-shipper demo --out demo-out

test: $(VENV)/test.done
	$(BIN)/python -m pytest -m waits -n 4
	$(BIN)/python -m pytest -m "not waits"

lint: $(VENV)/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/test.done
	$(BIN)/python benchmarks/log_latency.py --quick
	$(BIN)/python benchmarks/ingest.py --quick

$(VENV)/demo.done: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[mlflow,demo]'
	touch $@

$(VENV)/test.done: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all,test]'
	touch $@

clean:
	rm -rf $(VENV) demo-out dist build
