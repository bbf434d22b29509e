# Outrider: `make serve` starts a server from nothing, `make test` proves it. `make help` lists the rest.
SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
# cpu or cuda: which pinned set to install.
OUTRIDER_DEVICE ?= $(shell if nvidia-smi -L >/dev/null 2>&1; then echo cuda; else echo cpu; fi)
ifeq ($(filter cpu cuda,$(OUTRIDER_DEVICE)),)
$(error OUTRIDER_DEVICE is cpu or cuda, not '$(OUTRIDER_DEVICE)')
endif
# Further flags for `make serve` and `make test`: make serve ARGS="--port 8000".
ARGS ?=
# Processes that run tests: one runs all tests with servers, the rest share the further files.
WORKERS ?= 2
# Modules are compiled once, not by every process that tests start.
PYTEST = env --unset PYTHONDONTWRITEBYTECODE $(BIN)/pytest --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder

LOCK := deploy/requirements/$(OUTRIDER_DEVICE).txt
# torch's builds for CPUs have other hashes than PyPI's.
LOCKS := $(LOCK) $(if $(filter cpu,$(OUTRIDER_DEVICE)),deploy/requirements/torch-cpu.txt)
DEV_LOCK := deploy/requirements/dev.txt
VENV := .venv
BIN := $(VENV)/bin
# Stamps carry a hash of their inputs, so that a second start neither installs nor asks a package index.
hash = $(shell cat $(1) 2>/dev/null | sha256sum | cut -c1-16)
RUNTIME := $(VENV)/.runtime-$(OUTRIDER_DEVICE)-$(call hash,$(LOCKS))
PROJECT := $(VENV)/.project-$(OUTRIDER_DEVICE)-$(call hash,$(LOCKS) pyproject.toml)
DEV := $(VENV)/.dev-$(call hash,$(DEV_LOCK))
CHECKERS := $(VENV)/check-deploy-$(call hash,deploy/requirements/check-deploy.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-deps --progress-bar off
# Debian packages that tests use. A test is skipped without its package.
PROGRAMS := chromium haproxy libibverbs1 prometheus
PROGRAMS_TRIED := $(VENV)/.programs-$(subst $() ,-,$(PROGRAMS))

.PHONY: help
help: ## Show this list
	@echo "Outrider: lossless speculative serving, inside SGLang."
	@echo
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'
	@echo
	@echo '  Variables: OUTRIDER_DEVICE=cpu|cuda (now: $(OUTRIDER_DEVICE)), PYTHON=python3.11, ARGS="--port 8000", WORKERS=2'

.PHONY: install
install: $(PROJECT) ## Make .venv and install the pinned packages into it (other targets do it when needed)

.PHONY: serve
serve: $(PROJECT) ## Start a server on 127.0.0.1:30000 with the embedded model
	@$(BIN)/outrider serve $(ARGS)

.PHONY: test
test: $(PROJECT) $(DEV) programs ## Run all tests (as root also installs Debian packages for some)
	@$(PYTEST) $(ARGS)

# Tests with results that depend on the processor's arithmetic, except those in Triton's interpreter.
ARITHMETIC := tests/kernels tests/drafters tests/scheduler tests/server/plugin \
	--ignore tests/kernels/cuda --ignore tests/server/plugin/interpreted -m "not server"
.PHONY: test-processors
test-processors: $(PROJECT) $(DEV) ## Run the tests of arithmetic as on other processors (hours; ARGS=tests/lossless: only these)
	@$(BIN)/python tests/support/processors.py $(PYTEST) $(if $(filter tests%,$(ARGS)),,$(ARITHMETIC)) $(ARGS)

# Tried once, where it may be: without a network the next `make test` shall not wait for one. It never fails.
# Debian starts services that it installs: the tests start their own.
.PHONY: programs
programs:
	@missing() { for name in $(PROGRAMS); do command -v $$name >/dev/null || dpkg -s $$name >/dev/null 2>&1 || echo $$name; done; }; \
	absent=$$(echo $$(missing)); root=; [ "$$(id -u)" = 0 ] || root="sudo -n"; \
	if [ -n "$$absent" ] && [ ! -e $(PROGRAMS_TRIED) ] && command -v apt-get >/dev/null && $$root true 2>/dev/null; then \
		echo "Installing Debian's $$absent, which tests use (once)"; \
		apt="$$root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=30"; \
		{ $$apt update && $$apt install --no-install-recommends -y $$absent; } >/dev/null 2>&1; \
		if [ -d /run/systemd/system ]; then $$root systemctl disable --now $$absent >/dev/null 2>&1; fi; \
		mkdir -p $(VENV) && touch $(PROGRAMS_TRIED); \
		absent=$$(echo $$(missing)); \
	fi; \
	if [ -n "$$absent" ]; then echo "Tests of $$absent are skipped: not installed (apt-get install $$absent)"; fi

.PHONY: check
check: lint ## Check style and types, run the quick tests: no servers, no training (three minutes)
	@$(PYTEST) -m "not server and not slow" $(ARGS)

.PHONY: check-deploy
check-deploy: $(CHECKERS) ## Check deploy/ with linters and schemas (a minute)
	@deploy/check.sh $(CHECKERS)/bin

# The wheels' platform is the oldest that SGLang has a wheel for.
COMPILE = $(CHECKERS)/bin/uv pip compile --quiet --no-header --no-annotate --python-version 3.11 \
	--python-platform x86_64-manylinux_2_34
.PHONY: lock
lock: $(CHECKERS) ## Write the locks of deploy/requirements anew from the pins in its .in files, with hashes
	@for name in $(basename $(notdir $(wildcard deploy/requirements/*.in))); do \
		$(COMPILE) --no-deps --generate-hashes deploy/requirements/$$name.in --output-file deploy/requirements/$$name.txt || exit; \
	done

# `make` anew after the locks: names of stamps carry their hashes. A failure does not hide further changes.
.PHONY: upgrade
upgrade: $(CHECKERS) ## Move all pins (PACKAGE=name: one) to the newest allowed, lock, install, check, list the changes
	@$(BIN)/python .ci/upgrade.py "$(PACKAGE)" $(COMPILE)
	@$(MAKE) --no-print-directory lock
	@$(MAKE) --no-print-directory install
	@$(MAKE) --no-print-directory check; failed=$$?; echo; \
	$(BIN)/python .ci/upgrade.py; \
	$(BIN)/python tests/support/sglang_contracts.py || failed=1; \
	echo "To go back: git checkout deploy/requirements && make install"; \
	exit $$failed

.PHONY: check-image
check-image: ## Build the image for CPUs and have it serve (root, buildah and debootstrap; ten minutes)
	@deploy/docker/check.sh $(ARGS)

.PHONY: test-gpu
test-gpu: $(PROJECT) $(DEV) ## Run the tests that need a GPU, and the lossless ones on it (docs/gpu.md)
	@$(BIN)/pytest tests/gpu $(if $(filter cuda,$(OUTRIDER_DEVICE)),tests/lossless) $(ARGS)

.PHONY: gpu-proof
gpu-proof: $(PROJECT) ## Make .gpu-proof, which proves Outrider on a GPU machine without a network (docs/gpu.md)
	@$(BIN)/python tests/gpu/proof/pack.py $(ARGS)

SANITIZERS := -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -g1 -O1
.PHONY: check-sanitizers
check-sanitizers: $(PROJECT) $(DEV) ## Run tests of the C++ kernels under ASan and UBSan (ten minutes; the build is kept)
	@export OUTRIDER_CPU_KERNELS_CXXFLAGS="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0; \
	$(BIN)/python -c 'from outrider.kernels.cpu import build, native; build.library(native.extra_flags())'; \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		$(BIN)/pytest tests/kernels tests/drafters/test_compiled_block.py $(ARGS)

.PHONY: performance
performance: $(PROJECT) $(DEV) ## Write docs/performance.md and README's chart from profiles/results
	@$(BIN)/python tests/measure/performance.py

.PHONY: lint
lint: $(PROJECT) $(DEV) ## Check style, types, plain English and the budget of lines and words (ruff, mypy, .ci)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python .ci/budget.py
	@$(BIN)/python .ci/plain.py

.PHONY: format
format: $(PROJECT) $(DEV) ## Format the code, write the tables in server/README anew
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/python tests/support/readme_tables.py

.PHONY: clean
clean: ## Remove .venv and caches of tools (the prepared model in the user's cache stays)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Outrider needs Python 3.11 or newer; name one with make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(RUNTIME): | $(BIN)/python
	@echo "Installing the packages of $(LOCK) into $(VENV) (a few minutes, once)"
	@$(PIP) --require-hashes -r $(LOCK)
	@[ $(OUTRIDER_DEVICE) = cuda ] || $(PIP) -r deploy/requirements/torch-cpu.txt
	@[ $(OUTRIDER_DEVICE) = cuda ] || $(BIN)/python -c 'import torch' 2>/dev/null || \
		{ echo "This torch is made for CUDA, as PyPI's is. Name PyTorch's index of packages for CPUs, which pytorch.org tells:" >&2; \
		echo "  rm -r $(VENV); make install PIP_EXTRA_INDEX_URL=ADDRESS" >&2; exit 1; }
	@rm -f $(VENV)/.runtime-* && touch $@

$(PROJECT): $(RUNTIME)
	@$(PIP) --quiet --no-build-isolation --editable .
	@rm -f $(VENV)/.project-* && touch $@

$(DEV): $(RUNTIME)
	@$(PIP) --quiet --require-hashes -r $(DEV_LOCK)
	@rm -f $(VENV)/.dev-* && touch $@

$(CHECKERS): deploy/requirements/check-deploy.txt | $(BIN)/python
	@rm -rf $(VENV)/check-deploy-* && $(PYTHON) -m venv $@
	@$@/bin/pip --disable-pip-version-check install --quiet --no-deps --require-hashes -r $<
