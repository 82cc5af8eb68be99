# One target a job; CI calls the same ones. `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
HOST ?= 127.0.0.1
PORT ?= 8000
RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock
PYTHON_SOURCES := $(shell find python kernels -name '*.py' -o -name '*.pyi') pyproject.toml README.md

export VIRTUAL_ENV := $(CURDIR)/$(VENV)

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

# --- set-up ---------------------------------------------------------------------------------------

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "miniinfer needs Python 3.11 or newer, not " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip uv
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml tests/constraints.txt
	$(UV) pip install -r pyproject.toml --group dev -c tests/constraints.txt
	touch $@

$(VENV)/.wheel: $(VENV)/.installed $(RUST_SOURCES) $(PYTHON_SOURCES)
	rm -rf dist
	$(BIN)/maturin build --release --locked --interpreter $(BIN)/python --out dist
	$(UV) pip install --quiet --no-deps --reinstall dist/*.whl
	touch $@

$(VENV)/.model: $(VENV)/.wheel
	$(BIN)/miniinfer fetch
	touch $@

$(VENV)/.tokenizers: $(VENV)/.installed tests/fetch_tokenizers.py
	$(BIN)/python tests/fetch_tokenizers.py $(VENV)/tokenizers
	touch $@

$(VENV)/.node: $(VENV)/.created tests/server/clients/package.json
	mkdir -p $(VENV)/node
	cp tests/server/clients/package.json $(VENV)/node
	npm install --silent --no-audit --no-fund --prefix $(VENV)/node
	touch $@

.PHONY: setup
setup: $(VENV)/.model ## Make .venv, build and install the wheel, fetch the built-in model

# --- run ------------------------------------------------------------------------------------------

.PHONY: serve
serve: setup ## Serve the built-in model on HOST:PORT (127.0.0.1:8000)
	$(BIN)/miniinfer serve --host $(HOST) --port $(PORT)

.PHONY: chat
chat: setup ## Talk to the built-in model in the terminal
	$(BIN)/miniinfer chat

# --- check ----------------------------------------------------------------------------------------

.PHONY: test
test: test-rust test-python ## Run every test, the Python ones against the installed wheel

.PHONY: test-rust
test-rust: $(VENV)/.tokenizers ## Unit, property and stress tests of the core
	MINIINFER_TOKENIZERS=$(CURDIR)/$(VENV)/tokenizers cargo test --locked --quiet -p miniinfer-core -p miniinfer-cpu

.PHONY: test-python
test-python: setup $(VENV)/.tokenizers $(VENV)/.node ## Tests of the package, kernels and server
	# Files side by side, one thread each: small models gain nothing from a second one.
	OMP_NUM_THREADS=1 MINIINFER_TOKENIZERS=$(CURDIR)/$(VENV)/tokenizers MINIINFER_NODE=$(CURDIR)/$(VENV)/node \
		$(BIN)/python -m pytest --numprocesses auto --dist loadfile

# The first run emulates all instructions that QEMU knows, the second a machine without dot products,
# which only the products of bytes differ on.
ARM := aarch64-unknown-linux-gnu
ARM_TEST := CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" \
	cargo test --locked --quiet --target $(ARM) -p miniinfer-cpu

.PHONY: test-arm
test-arm: ## The CPU kernels for aarch64, in QEMU; needs qemu-aarch64, a cross compiler and rustup
	@for tool in qemu-aarch64 aarch64-linux-gnu-gcc rustup; do \
		command -v $$tool > /dev/null || { echo "test-arm needs $$tool (Debian: qemu-user gcc-aarch64-linux-gnu)" >&2; exit 1; }; \
	done
	rustup target add $(ARM)
	QEMU_CPU=max $(ARM_TEST)
	QEMU_CPU=cortex-a57 $(ARM_TEST) --test linear

.PHONY: test-loom
test-loom: ## Model-check the channel and the wake
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --locked --release -p miniinfer-core --lib loom

.PHONY: test-long
test-long: ## Property tests in their long form: 10,000 programs each
	PROPTEST_CASES=10000 cargo test --locked --release -p miniinfer-core

.PHONY: soak
soak: setup ## Ten minutes of clients that cut, stall and send garbage; nothing may be left behind
	SOAK_SECONDS=600 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/server/test_soak.py

.PHONY: lint
lint: $(VENV)/.wheel ## Formatting, clippy, ruff, mypy, stubtest
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest miniinfer._core

.PHONY: format
format: $(VENV)/.installed ## Format the sources
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# --- measure --------------------------------------------------------------------------------------

.PHONY: bench
bench: ## The core's micro-benchmarks
	cargo bench --locked -p miniinfer-core

.PHONY: bench-core
bench-core: $(VENV)/.wheel ## The core beside a scheduler in plain Python; refreshes benches/
	$(BIN)/python benches/core.py

.PHONY: bench-cpu
bench-cpu: $(VENV)/.model ## The CPU backend, beside what peers are installed; refreshes benches/
	GOMP_SPINCOUNT=1000 $(BIN)/python benches/cpu.py

.PHONY: bench-peers
bench-peers: $(VENV)/.model ## Install the peers that bench-cpu compares with; takes a while
	$(BIN)/python benches/peers/install.py

.PHONY: bench-text
bench-text: $(VENV)/.model ## Detokenising, stop strings, events, grammars; refreshes benches/
	$(BIN)/python benches/text.py

.PHONY: bench-speculation
bench-speculation: $(VENV)/.model ## What drafts save and what they cost; refreshes benches/
	$(BIN)/python benches/speculation.py

.PHONY: bench-serve
bench-serve: $(VENV)/.wheel ## What a streamed token costs, for each layout of processes
	$(BIN)/python benches/serve.py

.PHONY: bench-slow-client
bench-slow-client: $(VENV)/.wheel ## Streams beside a client that reads a byte a second
	$(BIN)/python benches/slow_client.py

# --- tidy -----------------------------------------------------------------------------------------

.PHONY: clean
clean: ## Remove what was built, the environment included
	rm -rf $(VENV) target dist
