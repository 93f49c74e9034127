# Two commands for a new clone: `make demo` and `make test`. Both install into .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-deps
DOCS ?= .venv-docs
export OMP_NUM_THREADS ?= 1
# Workers, each with a Ray of its own and 3 GB: much of a test is waiting. A file stays with one of them.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-fast lint format install docs wheel

demo: install
	$(BIN)/python examples/run_grpo.py

# A test that fails beside a busy neighbour runs once more, alone. What fails twice fails.
test: install
	$(PYTEST) || { [ $$? -eq 1 ] && $(BIN)/python -m pytest --last-failed --last-failed-no-failures none; }

test-fast: install
	$(PYTEST) -k "not (adapter_refits or command_line or every_key or multi_node or test_slurm.py or slurm_jobs or vllm_scheduler or ray_jobs or engines or grpo or invariance or ppo or distillation or recipes or evaluation or text_algorithms or lora or policy or training)"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site in build/site, from packages of its own; a link that leads nowhere fails.
docs: $(DOCS)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --strict

wheel: install
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

install: $(VENV)/installed

# Three pips, since one unpacks and compiles on one core alone; the largest packages (torch, vllm) come first.
$(VENV)/installed: requirements/cpu.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	tac requirements/cpu.txt | grep -v '^#' | xargs -n 16 -P 3 $(PIP) --use-pep517
	$(PIP) --no-build-isolation -e .
	touch $@

$(DOCS)/installed: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements/docs.txt
	touch $@
