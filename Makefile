PYTHON ?= python3
BENCH ?= all --quick
RESULTS ?= runs/bench
BASE ?= HEAD
QUICK ?=

BIN := .venv/bin
STAMP := .venv/.installed
# What few commands need, so that `make test` installs none of it.
FRAMEWORKS := .venv/.frameworks
SITE := .venv/.site
# The newest Triton, before the pinned one on the path where kernels are compiled for both.
NEWEST := .triton
# The oldest and the newest transformers that the extra allows, in place of the pinned one.
OF_TRANSFORMERS := .transformers

# Two workers of one thread each: with more, torch's own thread pools fight over the cores.
# Compiled Python is kept, since many tests start processes, which import dpflash.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

# Those in which a Triton kernel runs or is compiled.
TRITON_TESTS = $(shell grep -l triton tests/kernels/test_*.py)

TRANSFORMERS_TESTS := $(addprefix tests/dpflash/integrations/test_,accelerate.py packed_models.py peft.py \
  trainer.py transformers.py) tests/end_to_end/test_pretrained.py

PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 1 -q

.PHONY: help demo test test-all soak lint docs bench compare ci gpu clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## train a small model privately on Python's own library sources
	@out=runs/demo; n=1; while [ -e $$out ]; do n=$$((n+1)); out=runs/demo-$$n; done; \
	  set -x; $(BIN)/dpflash train --out $$out

test: $(STAMP) ## run the tests that need no GPU: one case of each, and all that kill a mutant
	$(TEST_ENV) $(PYTEST)

test-all: $(STAMP) $(FRAMEWORKS) $(SITE) $(NEWEST)/.installed $(OF_TRANSFORMERS)/oldest/.installed $(OF_TRANSFORMERS)/newest/.installed ## run all cases of all tests, those of kernels and transformers again under other versions, and install afresh
	$(TEST_ENV) DPFLASH_FULL=1 $(PYTEST)
	$(TEST_ENV) DPFLASH_FULL=1 PYTHONPATH=$(CURDIR)/$(NEWEST) $(PYTEST) $(TRITON_TESTS)
	for age in oldest newest; do $(TEST_ENV) PYTHONPATH=$(CURDIR)/$(OF_TRANSFORMERS)/$$age $(PYTEST) $(TRANSFORMERS_TESTS) || exit 1; done
	tests/install_afresh.sh $(PYTHON)

soak: $(STAMP) $(FRAMEWORKS) ## long campaigns, whose results are committed: how tight the audit is, what it and trials catch, held-out loss in float8 (a day); first, 50 killed ranks (minutes)
	$(TEST_ENV) DPFLASH_KILLS=50 $(BIN)/pytest -q tests/distributed/test_train_ranks.py -k killed_at_any_moment
	$(BIN)/python benchmarks/scripts/audit_figures.py --out benchmarks/results/audit.json
	$(BIN)/python benchmarks/scripts/isolation_figures.py --out benchmarks/results/isolation.json
	$(BIN)/python benchmarks/scripts/private_quality.py arithmetic --json benchmarks/results/fp8-quality.json
	$(BIN)/python benchmarks/scripts/private_quality.py patterns --steps 500 --json benchmarks/results/pattern-quality.json
	$(BIN)/python benchmarks/scripts/opacus_tests.py --out benchmarks/results/opacus-tests.json

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(SITE) ## build the site in runs/site, without network; warnings are errors
	$(BIN)/sphinx-build -q -E -W --keep-going -c docs -b html . runs/site
	@echo "runs/site/docs/index.html"

bench: $(STAMP) ## measure on this machine (BENCH="variants" for one benchmark in full)
	$(BIN)/dpflash bench $(BENCH) --out $(RESULTS)

compare: $(STAMP) ## is this tree slower than the commit BASE? both take turns (BASE=main QUICK=1)
	@[ "$$(git rev-parse --quiet --verify '$(BASE)^{commit}')" != "$$(git rev-parse HEAD)" ] || [ -n "$$(git status --porcelain)" ] \
	  || echo "BASE=$(BASE) is this tree, which is compared with itself; pass such as BASE=main" >&2
	@base=$$(mktemp -d) && trap 'rm -rf "$$base"; git worktree prune' EXIT && trap 'exit 130' INT TERM && \
	  git worktree add --quiet --detach "$$base" '$(BASE)' && \
	  $(BIN)/dpflash bench versus "$$base" . $(if $(QUICK),--quick) --out $(RESULTS)/compare

ci: lint test ## what a change must pass: lint, tests, and no slowdown beside the commit before it
	$(MAKE) compare QUICK=1 BASE=HEAD~1

gpu: $(STAMP) ## on a GPU: is it right, where does the time go, which configurations are best?
	@ok=0; for stage in right time tune; do OUT=runs/gpu LIMIT_S=3600 benchmarks/gpu.sh $$stage || ok=1; done; exit $$ok

clean: ## remove what was built, .venv included
	rm -rf .venv $(NEWEST) $(OF_TRANSFORMERS) build dist *.egg-info runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone: the pinned release decides which build (CPU or CUDA) the rest resolves to.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "dpflash needs Python 3.10 or newer as PYTHON; '$(PYTHON)' is missing or older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "installing dpflash and its tools into .venv (some minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -qq --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(FRAMEWORKS): $(STAMP)
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[frameworks]'
	@touch $@

$(SITE): $(STAMP)
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

$(NEWEST)/.installed: $(STAMP)
	@$(BIN)/pip install -qq --disable-pip-version-check --upgrade --no-deps --target $(NEWEST) triton
	@touch $@

$(OF_TRANSFORMERS)/%/.installed: $(STAMP) pyproject.toml
	@asked=transformers; [ $* = newest ] || asked=$$(grep -o 'transformers>=[0-9.]*' pyproject.toml | sed 's/>=/==/'); \
	  mkdir -p $(@D) && grep -Ev '^(transformers|tokenizers)==' constraints.txt >$(@D)/constraints.txt && \
  $(BIN)/pip install -qq --disable-pip-version-check --upgrade --target $(@D) -c $(@D)/constraints.txt "$$asked"
	@touch $@
