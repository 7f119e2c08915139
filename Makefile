# Two commands do everything on a fresh machine with Rust, Go, Python 3, make and a C compiler:
#   make demo    the main job, end to end: a real control plane and simulated EC2, no account needed (KEEP=1 leaves it running)
#   make test    every test
# What is built or installed on the way is pinned and cached outside the checkout, so that a second run is quick.

SHELL := /bin/bash
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/stowage
export CARGO_TARGET_DIR ?= $(CACHE)/target
export STOWAGE_BIN ?= $(CARGO_TARGET_DIR)/debug/stowage
PYTHON ?= python3
# Classes of e2e/e2e_test.py.
E2E := Extender Nominate Filtered Nominated Off
# The control plane's binaries: built once by e2e/tools/build, or ready-made ones where STOWAGE_E2E_BIN points.
CARGO_DENY_VERSION := 0.20.2
CARGO_DENY := $(CACHE)/cargo-deny-$(CARGO_DENY_VERSION)/bin/cargo-deny

.PHONY: help demo checkout bench bench-launches test build tools moto lint deny test-rust test-chart test-control-plane test-policies test-kubelets test-preflight test-ec2 test-ec2-leaving test-ec2-faults test-drift test-scenarios test-e2e $(E2E:%=test-e2e-%) crds clean-cache

help: ## Say what can be made
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | column -t -s "$$(printf '\t')"

demo: build tools ## The main job, end to end (KEEP=1 leaves it running)
	$(PYTHON) e2e/demo.py

# Suites wait side by side, but those that say how far kube-scheduler follows a plan have the machine for themselves.
test: ## Every test
	$(MAKE) lint deny test-policies
	$(MAKE) -j2 build tools moto
	$(MAKE) -j2 --output-sync=target test-rust test-preflight test-control-plane test-chart test-kubelets test-scenarios
	$(MAKE) test-e2e
	$(MAKE) -j2 --output-sync=target test-ec2-faults test-ec2-leaving test-drift test-ec2
	@echo "make test: all passed"

# Tests know the folder that they were built in. Cargo doesn't see that another checkout built them in the same cache.
checkout:
	@mkdir -p $(CARGO_TARGET_DIR) && echo $(CURDIR) | cmp -s - $(CARGO_TARGET_DIR)/checkout || touch src/lib.rs tests/*.rs
	@echo $(CURDIR) > $(CARGO_TARGET_DIR)/checkout

build: checkout ## The binary
	cargo build --locked

tools: ## The control plane's binaries, once
	e2e/tools/build >/dev/null

moto: ## moto's server of AWS protocols, once
	e2e/tools/moto >/dev/null

lint: ## Formatting and lints; a warning is an error
	cargo fmt --all -- --check
	cargo clippy --locked --all-targets -- -D warnings

$(CARGO_DENY):
	cargo install --locked --quiet --debug --version $(CARGO_DENY_VERSION) --root $(CACHE)/cargo-deny-$(CARGO_DENY_VERSION) cargo-deny

deny: $(CARGO_DENY) ## Licences, bans and sources of every dependency (advisories: see deny.toml)
	$(CARGO_DENY) --log-level error check licenses bans sources

test-policies: ## The AWS policies of docs/aws against the calls of the code
	$(PYTHON) e2e/policies_test.py

test-rust: checkout ## Unit, property and wire tests
	cargo test --locked --quiet

test-scenarios: build ## Plans of every scenario kind, judged by the independent checker
	$(PYTHON) e2e/scenarios_test.py

test-control-plane: tools ## The control plane itself
	$(PYTHON) e2e/control_plane_test.py

test-chart: tools ## The chart and the plain manifests, on a real control plane
	$(PYTHON) e2e/chart_test.py

test-kubelets: tools moto ## moto, and kubelets for its instances
	$(PYTHON) e2e/kubelets_test.py

test-preflight: build tools moto ## stowage preflight against moto
	$(PYTHON) e2e/preflight_test.py

test-ec2: build tools moto ## The whole service on EC2's wire protocol
	$(PYTHON) e2e/ec2_test.py

test-ec2-leaving: build tools moto ## The same: interruptions, status checks, vanished instances, drains with an end
	$(PYTHON) e2e/ec2_leaving_test.py

test-ec2-faults: build tools moto ## What becomes of pods when EC2 throttles, fails, loses answers and runs out
	$(PYTHON) e2e/ec2_faults_test.py

test-drift: build tools moto ## Drift and expiration, with simulated EC2 and with moto
	$(PYTHON) e2e/drift_test.py

test-e2e: $(E2E:%=test-e2e-%) ## The whole service, with the real kube-scheduler

$(E2E:%=test-e2e-%): test-e2e-%: build tools
	$(PYTHON) e2e/e2e_test.py $*

bench: ## Cost, time and memory beside Karpenter's, as a table and a plot (BENCH=--ours-only is quick)
	cargo build --release --locked
	$(PYTHON) benches/bench.py --binary $(CARGO_TARGET_DIR)/release/stowage --out $(CARGO_TARGET_DIR)/bench $(BENCH)
	cargo bench --locked --quiet --bench incremental | tee $(CARGO_TARGET_DIR)/bench/incremental.md
	$(MAKE) bench-launches

bench-launches: tools moto ## Calls per 1,000 launches and time from plan to CreateFleet, of the release build against moto
	cargo build --release --locked
	@mkdir -p $(CARGO_TARGET_DIR)/bench && rm -f $(CARGO_TARGET_DIR)/bench/launches.json
	STOWAGE_BIN=$(CARGO_TARGET_DIR)/release/stowage STOWAGE_EC2_FIGURES=$(CARGO_TARGET_DIR)/bench/launches.json $(PYTHON) e2e/ec2_test.py Launches
	set -o pipefail; $(PYTHON) benches/launches.py $(CARGO_TARGET_DIR)/bench/launches.json | tee $(CARGO_TARGET_DIR)/bench/launches.md

crds: ## Write crds/ anew from src/api, and what is made from it
	STOWAGE_REGENERATE=1 cargo test --locked --quiet --lib api::crds
	charts/sync-crds
	webhook-config/generate

clean-cache: ## Forget everything that was built or installed outside the checkout
	rm -rf $(CACHE)
