# Each target creates the environment when it is missing and reuses it afterwards.
PYTHON ?= python3.12
VENV ?= .venv
SEED ?= 0
CONFIG ?= configs/tabletop_reach.yaml
BIN := $(VENV)/bin
FILES := pyproject.toml constraints.txt

.PHONY: align test lint clean system

# The whole loop: demonstrations, start policy, preference labels, reward model, GRPO, evaluation, report.
align: $(VENV)/.align
	$(BIN)/vla-rlaif doctor
	$(BIN)/vla-rlaif train $(CONFIG) --seed $(SEED) --overwrite

test: $(VENV)/.test
	$(BIN)/vla-rlaif doctor
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

$(VENV)/.align: $(FILES) | system
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[jax,torch]'
	touch $@

$(VENV)/.test: $(FILES) | system
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[all]'
	touch $@ $(VENV)/.align

# Software GL for headless rendering. Installed where we may; otherwise `doctor` says what is missing.
system:
	@if ! ldconfig -p | grep -q libEGL.so.1 && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -q && apt-get install -q -y --no-install-recommends libegl1 libgl1 libgl1-mesa-dri; \
	fi

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache
