# Each target makes what it needs, on a fresh machine too. PYTHON chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What a trainer has beside us. Where the package index has it, take the CPU build: TORCH='torch==2.13.0+cpu'.
VERL_VENV := .venv-verl
TORCH ?= torch==2.13.0
VERL := 0.9.1
VERL_OLDER := 0.6.1 0.7.1 0.8.0 0.9.0

.PHONY: demo test test-verl lint docs bench matrix pictures clean

# A daemon, a real little training, three destinations, the account. No accounts, no torch, under three minutes.
demo: $(VENV)/demo.done
	$(BIN)/verl-shipper demo --out demo-out

test: $(VENV)/test.done
	$(BIN)/python -m pytest -m "not alone and not verl and not torch" -n 4 --dist worksteal
	$(BIN)/python -m pytest -m "alone and not verl and not torch"

# Real verl, Ray and torch on the CPU: an environment of its own, 2 GB, and Chromium for the pages of MLflow.
test-verl: $(VERL_VENV)/test.done
	$(VERL_VENV)/bin/python -m pytest -m torch -n 2 --dist worksteal tests/torch tests/gpu tests/field
	$(VERL_VENV)/bin/python -m pytest -m verl tests/verl

lint: $(VENV)/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Every fault at every tracker with an SDK, at full length: about 20 minutes. Puts the table into docs/delivery-guarantees.md.
matrix: $(VENV)/test.done
	VERL_SHIPPER_TEST_LONG=1 VERL_SHIPPER_MATRIX_DIR=$(VENV)/matrix $(BIN)/python -m pytest -n 2 tests/fault/test_tracker_matrix.py
	cd tests && ../$(BIN)/python -m support.matrix ../$(VENV)/matrix

# The tables of docs/configuration.md, from what the code declares.
docs: $(VENV)/test.done
	$(BIN)/python -m verl_shipper.config_docs docs/configuration.md

bench: $(VENV)/test.done
	$(BIN)/python benchmarks/log_latency.py --quick
	$(BIN)/python benchmarks/ingest.py --quick
	$(BIN)/python benchmarks/policy.py --quick
	$(BIN)/python benchmarks/traces.py --quick
	$(BIN)/python benchmarks/training_interference.py --quick

$(VENV)/demo.done: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[mlflow,demo]'
	touch $@

$(VENV)/test.done: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all,test]'
	touch $@

$(VERL_VENV)/test.done: pyproject.toml tests/verl/requirements.txt
	test -x $(VERL_VENV)/bin/python || $(PYTHON) -m venv $(VERL_VENV)
	$(VERL_VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check '$(TORCH)' \
		-e '.[mlflow,otlp,tokens,test]' -r tests/verl/requirements.txt
	$(VERL_VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps verl==$(VERL)
	for version in $(VERL_OLDER); do $(VERL_VENV)/bin/python -m pip download --quiet --disable-pip-version-check \
		--no-deps --dest $(VERL_VENV)/verl-wheels verl==$$version || exit 1; done
	touch $@

# The pictures of docs/verl.md, taken anew from a real job.
pictures: $(VERL_VENV)/test.done
	VERL_SHIPPER_TEST_PICTURES=$(CURDIR)/docs/pictures $(VERL_VENV)/bin/python -m pytest -m verl tests/verl/test_shipped_job.py

clean:
	rm -rf $(VENV) $(VERL_VENV) demo-out dist build
