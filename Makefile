# `make` lists the targets. Every target sets up .venv first, once.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -q -c requirements/lock.txt
TORCH := torch==2.13.0
STAMP := $(VENV)/.mosar-installed
COMPILE := from mosar.kernels.build import instruction_sets, load_library as load; \
	[load(isa) for isa in ("native", *instruction_sets()[:-1])]

.DEFAULT_GOAL := help
.PHONY: help setup reproduce test check bench figures docs dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with the pinned test environment (PYTHON=... chooses the Python)

# torch goes in first and is named again in the second step, so that no dependency of ours can
# bring in another build of it.
$(STAMP): pyproject.toml requirements/lock.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "mosar needs Python 3.11 or newer; name one with: make setup PYTHON=python3.11" >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) '$(TORCH)' -e '.[data,dev,gpu,hf,report,tensorboard]'
	@$(PIP) --only-binary :all: '$(TORCH)' -e '.[megatron]' || \
		echo "megatron-core has no wheel for this Python: its adapter is not tested here" >&2
	@touch $@

reproduce: setup ## train and evaluate the ten matched variants, preset quick: runs/quick/report; 20 to 40 minutes
	$(VENV)/bin/mosar reproduce --preset quick --out runs/quick

test: setup ## run the tests (all but those marked slow or rivals)
	$(PY) -m pytest -q -n auto --dist worksteal -m 'not slow and not rivals'

check: setup ## what CI runs: ruff, format, pyright, tests
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@# What the tests would wait for is compiled meanwhile.
	@$(PY) -c '$(COMPILE)' & $(PY) -m pyright; checked=$$?; wait; exit $$checked
	@$(MAKE) --no-print-directory test

bench: setup ## measure attention: a table, and runs/bench/attention.{jsonl,png}; takes minutes
	@mkdir -p runs/bench
	$(VENV)/bin/mosar bench attention --json runs/bench/attention.jsonl \
		--plot runs/bench/attention.png

LOOK = $(VENV)/bin/mosar look $(RUN) --text src/mosar/microscope/sample.txt --out build/look.html

figures: setup ## redraw docs/images; RUN=runs/... (a run of mosar-plus) also redraws the microscope's
	$(VENV)/bin/mosar figure decay-kernels --out docs/images/decay_kernels.png
ifdef RUN
	@mkdir -p build
	$(LOOK) --picture docs/images/look_text.png --view 'reading?alone&token=354&layer=0'
	$(LOOK) --picture docs/images/look_map.png --view 'map-section?alone&role=1'
endif

docs: setup ## build the site in build/site, offline; any broken link fails it
	$(PIP) '$(TORCH)' -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build -q
	@echo "the site: build/site/index.html"

# The wheel is built from the source archive, so an archive that lacks a file fails here.
dist: setup ## build dist/mosar-*.tar.gz and from it the wheel
	rm -rf dist
	$(PY) -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")' >/dev/null
	$(PY) -m pip wheel -q --no-deps --no-build-isolation -w dist dist/mosar-*.tar.gz

clean: ## remove caches and build output (.venv stays)
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
