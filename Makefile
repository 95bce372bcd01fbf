# Everything is installed into .venv on first use; `make clean` takes it away again.
#
#   PYTHON  the interpreter the environment is made from, 3.11 or newer
#   TORCH   the torch to install first, before it is pulled in as a dependency. For Linux PyPI's own build brings gigabytes of
#           CUDA libraries; unless TORCH says otherwise, a machine without a GPU takes the build for CPUs, if CPU_TORCH answers
#   CPU_TORCH  the index that has it
#   SHARD   K/N runs the K-th of N parts of the slow tests, or of the containers'; all of them unless given
#   ARGS    further flags: make up ARGS='--workers 1', make test ARGS='-k router'

PYTHON ?= python3
CPU_TORCH ?= https://download.pytorch.org/whl/cpu
ifeq ($(origin TORCH),undefined)
TORCH := torch==2.13.0
# Of equal versions pip takes the one with +cpu. In recipes only: it asks the index.
for_cpu = $$([ "$$(uname -s)" != Linux ] || [ -e /dev/nvidiactl ] || [ -e /dev/dxg ] || ! $(BIN)/python -c \
  'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' $(CPU_TORCH)/torch/ 2>/dev/null \
  || echo --extra-index-url $(CPU_TORCH))
endif
ARGS ?=
ROUNDS ?= 20
PART ?= 1/1
SHARD ?=
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml hatch_build.py $(wildcard protos/sapwood/v1/*.proto kernels/sapwood_kernels/native/*.[ch])
# The protos of the last tag, as an image of buf's: a shallow clone has no tags. `make lint` refuses what would break their clients.
RELEASED := protos/released.binpb
# One compute thread a test process: the processes are what runs in parallel, one more than cores as each often waits for others.
# Bytecode is kept, whatever the shell says: tests start hundreds of processes.
TEST_ENV := PYTEST_XDIST_AUTO_NUM_WORKERS=$(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.PHONY: help up test test-slow test-clients test-containers test-losses test-handoffs audit lint fmt proto proto-release version docs site bench-cpu bench-gguf bench-scheduler bench-tokenizer bench-router bench-floods bench-fleet bench-gpu trace node clean

help: ## Show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: $(BIN)/.installed ## Install, fetch the demo model, start tokenizer, 2 workers and router here; Ctrl-C stops them
	@$(BIN)/sapwood model fetch demo
	@exec $(BIN)/sapwood up $(ARGS)

test: $(BIN)/.installed-dev $(BIN)/.system node ## Run the tests but the slow ones
	$(TEST_ENV) $(BIN)/pytest -n auto -m "not slow" $(ARGS)

test-slow: $(BIN)/.installed-dev $(BIN)/.browsers ## Run the slow tests: SHARD=2/6 a sixth of them
	$(TEST_ENV) SHARD=$(SHARD) $(BIN)/pytest -n auto -m "slow and not containers and not clients" $(ARGS)

test-clients: $(BIN)/.installed-dev ## Install other people's clients and benchmarks and run their calls against a demo cluster
	$(BIN)/pytest tests/clients -m clients -v $(ARGS)

test-containers: $(BIN)/.installed-dev ## Build the images, run the compose file on a Docker engine of its own and hurt it (root on Debian)
	SHARD=$(SHARD) $(BIN)/pytest tests/containers -m containers -v -s -rs $(ARGS)

lint: $(BIN)/.installed-dev ## Check style, types, the dependency rule and the protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against $(RELEASED)

test-losses: $(BIN)/.installed-dev ## Kill, stop, freeze and cut off one of four demo workers and kill the tokenizer under load, 20 times each (12 GB): ROUNDS=5
	SAPWOOD_LOSS_WORKERS=4 SAPWOOD_LOSS_ROUNDS=$(ROUNDS) $(BIN)/pytest tests/integration/test_worker_loss.py -m slow -s $(ARGS)

test-handoffs: $(BIN)/.installed-dev ## Kill, stop and cut off prefill and decode workers of the demo model at six points of a hand-over, 20 times each: ROUNDS=5 PART=1/6
	SAPWOOD_LOSS_ROUNDS=$(ROUNDS) SAPWOOD_LOSS_PART=$(PART) $(BIN)/pytest tests/integration/test_disaggregated_losses.py -m slow -s $(ARGS)

audit: $(BIN)/.installed-dev ## Look the installed packages up in the advisory database
	@$(BIN)/pip install -qq pip-audit
	@$(BIN)/python tests/audit.py

fmt: $(BIN)/.installed-dev ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(BIN)/.installed-dev ## Generate the Python stubs from protos/ again
	$(BIN)/python hatch_build.py

proto-release: $(BIN)/.installed-dev ## Take the protos as they are now for those that clients hold: before a release is tagged
	$(BIN)/buf build protos --exclude-source-info -o $(RELEASED)

version: ## Set the version of the package and of the images' tags: V=0.2.0
	@old=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml); test -n "$(V)" && test -n "$$old" && \
	sed -i "s/^version = \"$$old\"/version = \"$(V)\"/" pyproject.toml && \
	sed -i "s/$$(echo $$old | sed 's/\./\\./g')/$(V)/g" $$(grep -rlF "$$old" deploy/k8s docker/*.Dockerfile docs/operations.md) && \
	echo "$$old -> $(V)"

docs: $(BIN)/.installed-dev ## Write the pages that come from the code and the dashboards from the code again
	$(BIN)/python docs/write_configuration.py
	$(BIN)/python docs/write_metrics.py
	$(BIN)/python docs/write_checkpoint_keys.py
	$(BIN)/python docs/write_sglang_flags.py
	$(BIN)/python deploy/observability/write_dashboards.py

site: $(BIN)/.installed-dev ## Build the documentation as a site in site/; ARGS=serve shows it at http://127.0.0.1:8001
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(if $(filter serve,$(ARGS)),serve -a 127.0.0.1:8001,build --quiet --clean)

bench-cpu: $(BIN)/.installed-dev ## Measure beside transformers on this CPU: ARGS='--plot bench.png' draws
	$(BIN)/python benchmarks/bench_cpu.py $(ARGS)

bench-gguf: $(BIN)/.installed-dev ## Measure the demo model in its own GGUF types beside llama.cpp and beside float32 weights
	$(BIN)/python benchmarks/bench_gguf.py $(ARGS)

bench-scheduler: $(BIN)/.installed-dev ## Measure what scheduler and prefix cache cost the host, and each policy's hit rate
	$(BIN)/python benchmarks/bench_scheduler.py $(ARGS)

bench-tokenizer: $(BIN)/.installed-dev ## Measure the tokenizer service beside the tokenizers library: ARGS='--model DIR'
	$(BIN)/python benchmarks/bench_tokenizer.py $(ARGS)

bench-router: $(BIN)/.installed-dev ## Measure the router beside smg, sglang-router and vllm-router: ARGS='speed hits'
	$(BIN)/python benchmarks/bench_router.py $(ARGS)

bench-floods: $(BIN)/.installed-dev ## Measure what other clients feel of floods by strangers, beside grpcio's server: ARGS='--floods PING'
	$(BIN)/python benchmarks/bench_floods.py $(ARGS)

bench-fleet: $(BIN)/.installed-dev ## Measure policies, indexes and admission against 1000 simulated workers: ARGS='--workers 100 --pages 100000 --rate 1000'
	$(BIN)/python benchmarks/bench_fleet.py $(ARGS)

trace: $(BIN)/.installed-dev ## Count what one streamed chat runs through: files, classes, live objects, borders, calls a token
	$(BIN)/python benchmarks/trace_request.py $(ARGS)

bench-gpu: $(BIN)/.installed-dev ## Check and measure engine and services on this CUDA GPU: ARGS=out.jsonl
	PATH="$(abspath $(BIN)):$$PATH" benchmarks/gpu/run.sh $(ARGS)

node: examples/node/node_modules/.installed # What examples/node needs

clean: ## Remove the environment and everything generated
	rm -rf $(VENV) examples/node/node_modules build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f sapwood/v1/*_pb2*.py sapwood/v1/*_pb2*.pyi sapwood/v1/descriptors.binpb

# An environment without pip is one that was left half made: Debian's Python without python3-venv makes such.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "Sapwood needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make an environment. Debian and Ubuntu:" \
	  "apt-get install python3-venv. Or name another: make PYTHON=/path/to/python3.12" >&2; exit 1; }

# Installs, and shows the large files while they come; what pip writes to standard error is shown if it fails.
install = @{ $(BIN)/pip install --disable-pip-version-check $(1) 2>$(VENV)/.pip; echo $$? >$(VENV)/.status; } \
  | sed -n 's/^ *Downloading \([^ ]*\) (\([0-9.]* [MG]B\)).*/  \1, \2/p'; \
  [ $$(cat $(VENV)/.status) = 0 ] || { cat $(VENV)/.pip >&2; exit 1; }

$(BIN)/.installed: $(BIN)/pip $(SOURCES)
	@echo "installing into $(VENV); the first time this takes a minute or two"
	$(call install,$(TORCH) $(for_cpu))
	$(call install,-e '.[all]')
	@touch $@

$(BIN)/.installed-dev: $(BIN)/pip $(SOURCES)
	@echo "installing into $(VENV), tools for development included; the first time this takes two minutes or so"
	$(call install,$(TORCH) $(for_cpu))
	$(call install,-e '.[dev]')
	@touch $(BIN)/.installed $@

$(BIN)/.system: $(BIN)/pip tests/system.sh
	@tests/system.sh $(BIN)
	@touch $@

$(BIN)/.browsers: $(BIN)/pip tests/system.sh
	@tests/system.sh $(BIN) chromium firefox-esr debootstrap
	@touch $(BIN)/.system $@

# Without Node the one test that needs it is skipped, and says so.
examples/node/node_modules/.installed: examples/node/package-lock.json
	@command -v npm >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nodejs npm >/dev/null; } || true
	@if command -v npm >/dev/null; then cd examples/node && npm ci --silent --no-audit --no-fund && touch node_modules/.installed; \
	  else echo "no npm here: the test of examples/node will be skipped" >&2; fi
