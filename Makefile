# Two commands do everything on a fresh machine with Rust, Go, Python 3, make and a C compiler:
#   make demo    the main job, end to end: a real control plane and simulated EC2, no account needed (KEEP=1 leaves it running)
#   make test    every test
# Everything that the targets build or install is pinned and cached outside the checkout, so that a second run is quick.

SHELL := /bin/bash
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/stowage
export CARGO_TARGET_DIR ?= $(CACHE)/target
export STOWAGE_BIN ?= $(CARGO_TARGET_DIR)/debug/stowage
PYTHON ?= python3
# The release of Rust whose rustfmt and clippy `make lint` expects.
RUST_VERSION := 1.95
# The end-to-end tests stop what they started when this process ends.
export STOWAGE_MAKE_PID ?= $(shell echo $$PPID)
# The Python of the end-to-end tests, with their packages; runs suites of e2e/: $(call pytest,ec2 drift).
E2E_PYTHON = $$(e2e/tools/environment)
pytest = $(E2E_PYTHON) -m pytest $(patsubst %,e2e/%_test.py,$(1))
# Classes of e2e/e2e_test.py, without their prefix.
E2E := Extender Nominate Filtered Nominated Off
# The control plane's binaries: built once by e2e/tools/build, or ready-made ones where STOWAGE_E2E_BIN points.
CARGO_DENY_VERSION := 0.20.2
CARGO_DENY := $(CACHE)/cargo-deny-$(CARGO_DENY_VERSION)/bin/cargo-deny
CARGO_CYCLONEDX_VERSION := 0.5.9
CARGO_CYCLONEDX := $(CACHE)/cargo-cyclonedx-$(CARGO_CYCLONEDX_VERSION)/bin/cargo-cyclonedx
# A clone of RustSec's database, in a folder whose name cargo-deny derives from the URL of the original.
ADVISORIES := $(CARGO_TARGET_DIR)/advisories
ADVISORY_DB_NAME := advisory-db-3157b0e258782691

.PHONY: help demo checkout bench fuzz bench-launches bench-state bench-api bench-karpenter test soak soak-memory build tools moto lint deny test-rust test-chart test-control-plane test-policies test-kubelets test-preflight test-ec2 test-ec2-leaving test-ec2-faults test-drift test-swap test-outage test-disruption test-monitoring test-attacks test-scenarios test-replay test-e2e test-moves $(E2E:%=test-e2e-%) test-without-service test-attacks-short test-kills test-kills-short quick reference crds clean-cache

help: ## List the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | column -t -s "$$(printf '\t')"

demo: ## The main use case, end to end (KEEP=1 leaves it running)
	$(MAKE) -j2 build demo-tools moto
	$(E2E_PYTHON) e2e/demo.py

.PHONY: demo-tools
demo-tools:
	e2e/tools/build etcd helm kubernetes kwok prometheus >/dev/null

# Suites that mostly wait run in parallel, the longest first. Those that measure how far kube-scheduler follows a plan run before them, beside
# the Rust tests, which only get the CPU time that is left over. Suites of one target share a control plane.
LANES := test-drift test-chart test-without-service test-ec2-faults test-ec2 test-disruption test-ec2-leaving test-kills-short test-karpenter-short \
	test-outage test-moves test-swap test-attacks-short test-monitoring test-preflight
# A failed end-to-end test runs once more, alone, after all lanes. If it passes then, it is reported as flaky and the run succeeds.
FAILURES = $(CARGO_TARGET_DIR)/e2e-failures.jsonl
test: ## Every test
	@mkdir -p $(CARGO_TARGET_DIR) && rm -f $(FAILURES)
	$(MAKE) lint deny sbom test-policies
	$(MAKE) -j2 build tools moto
	STOWAGE_FAILURES=$(FAILURES) $(MAKE) -j2 --output-sync=target test-e2e test-rust
	STOWAGE_FAILURES=$(FAILURES) $(MAKE) -j5 --output-sync=target $(LANES)
	$(E2E_PYTHON) e2e/second_attempt.py $(FAILURES)
	@echo "make test: all passed"

soak: build tools moto ## The suites of the whole service with 500 pods of each kind instead of 150, for releases
	STOWAGE_SOAK=1 $(call pytest,e2e)

soak-memory: checkout ## A million pods through the state: memory stays flat
	cargo test --release --locked --package stowage --lib -- --ignored --nocapture memory_stays_flat

test-without-service: build tools moto ## Suites that do not need the running service, in one control plane
	$(call pytest,control_plane kubelets scenarios replay)

# Tests know the folder that they were built in. Cargo doesn't see that another checkout built them in the same cache.
checkout:
	@mkdir -p $(CARGO_TARGET_DIR) && echo $(CURDIR) | cmp -s - $(CARGO_TARGET_DIR)/checkout || touch src/lib.rs src/*/lib.rs tests/*.rs
	@echo $(CURDIR) > $(CARGO_TARGET_DIR)/checkout

build: checkout ## The binary
	cargo build --locked

tools: ## The control plane's binaries, once; the replay of plans and Karpenter's suites, into Go's cache
	e2e/tools/build >/dev/null
	cd e2e/replay && CGO_ENABLED=0 GOFLAGS= GOWORK=off go build -mod=readonly -trimpath -o /dev/null .
	cd e2e/karpenter-suites && CGO_ENABLED=0 GOFLAGS= GOWORK=off go test -mod=readonly -trimpath -c -o /dev/null sigs.k8s.io/karpenter/test/suites/regression

moto: ## The Python packages of the end-to-end tests (moto, pytest, boto3, the Kubernetes client), once
	e2e/tools/environment >/dev/null

lint: moto ## Formatting, lints and spelling; a warning is an error
	@rustc --version | grep -q "^rustc $(RUST_VERSION)\." || { echo "make lint needs Rust $(RUST_VERSION), this is $$(rustc --version): rustfmt and clippy change between releases; run 'rustup override set $(RUST_VERSION)'" >&2; exit 1; }
	$$(dirname $$(e2e/tools/environment))/typos --format brief
	cargo fmt --all -- --check
	cargo clippy --locked --all-targets -- -D warnings

$(CARGO_DENY):
	cargo install --locked --quiet --debug --version $(CARGO_DENY_VERSION) --root $(CACHE)/cargo-deny-$(CARGO_DENY_VERSION) cargo-deny

deny: $(CARGO_DENY) ## Licenses, bans and sources of every dependency (advisories: make advisories)
	$(CARGO_DENY) --log-level error check licenses bans sources

.PHONY: advisories sbom
advisories: $(CARGO_DENY) ## Known vulnerabilities of every dependency (ADVISORY_DB=FOLDER: a clone of RustSec's advisory-db, if its host is out of reach)
ifdef ADVISORY_DB
	@mkdir -p $(ADVISORIES) && ln -sfn $(abspath $(ADVISORY_DB)) $(ADVISORIES)/$(ADVISORY_DB_NAME)
	@echo "RustSec's database of $$(git -C $(ADVISORY_DB) log -1 --format='%cs, commit %h')"
	@sed 's|^\[advisories\]|&\ndb-path = "$(ADVISORIES)"|' deny.toml > $(ADVISORIES)/deny.toml
	$(CARGO_DENY) --offline --log-level error --config $(ADVISORIES)/deny.toml check advisories
else
	$(CARGO_DENY) --log-level error check advisories
endif

$(CARGO_CYCLONEDX):
	cargo install --locked --quiet --debug --version $(CARGO_CYCLONEDX_VERSION) --root $(CACHE)/cargo-cyclonedx-$(CARGO_CYCLONEDX_VERSION) cargo-cyclonedx

sbom: $(CARGO_CYCLONEDX) ## The CycloneDX SBOM of the binary for each platform of the image
	e2e/tools/sbom $(CARGO_CYCLONEDX) $(CARGO_TARGET_DIR)/sbom

test-policies: moto ## The AWS policies of docs/aws against the calls of the code; log messages that the tests search for; the comparison of recorded requests; the Dockerfile; the second attempt of failed tests
	$(call pytest,policies recording messages image second_attempt)

fuzz: checkout ## Ten million executions of the fuzz targets in the release build, with overflow checks; 80,000 random histories of a cluster (STOWAGE_FUZZ_SEED=N for other ones)
	STOWAGE_FUZZ_EXECUTIONS=$${STOWAGE_FUZZ_EXECUTIONS:-1650000} cargo test --release --locked --quiet --package stowage --lib -- test_support::fuzz --nocapture
	PROPTEST_CASES=$${STOWAGE_HISTORIES:-20000} PROPTEST_RNG_SEED=$${STOWAGE_FUZZ_SEED:-11} cargo test --release --locked --quiet --package stowage --lib -- every_history

test-rust: checkout ## Unit, property and wire tests
	nice cargo test --locked --quiet

test-scenarios: build moto ## Plans of every scenario kind, judged by the independent checker
	$(call pytest,scenarios)

test-replay: build tools moto ## Plans of random clusters, replayed through kube-scheduler's filter plugins (STOWAGE_REPLAY=3000 for more)
	$(call pytest,replay)

test-control-plane: tools moto ## The control plane itself
	$(call pytest,control_plane)

test-chart: build tools moto ## The chart, its alerts and the plain manifests on a real control plane, with the real cert-manager
	$(call pytest,chart chart_policies alerts certificates)

test-kubelets: tools moto ## moto, and kubelets for its instances
	$(call pytest,kubelets)

test-preflight: build tools moto ## stowage preflight against moto
	$(call pytest,preflight)

test-ec2: build tools moto ## The whole service on EC2's wire protocol: launches
	$(call pytest,ec2)

test-ec2-leaving: build tools moto ## The same: interruptions, status checks, vanished instances, grace periods
	$(call pytest,ec2_leaving)

test-ec2-faults: build tools moto ## The same: throttling, errors, lost responses, missing capacity
	$(call pytest,ec2_faults)

test-kills: build tools moto ## The same: fifty kills at random moments of launches, drains and interruptions (STOWAGE_KILLS_SEED=N repeats a run)
	STOWAGE_KILLS=$${STOWAGE_KILLS:-50} STOWAGE_KILLS_SEED=$${STOWAGE_KILLS_SEED:-$$RANDOM} $(call pytest,kills)

test-kills-short: build tools moto ## Four of them
	$(call pytest,kills)

test-outage: build tools moto ## Outages of the API server: stopped, killed, dropped packets, compacted history
	$(call pytest,outage) -s

test-attacks: tools moto ## Attacks by peers without credentials and by tenants, against the release build: probes, memory, purchases
	cargo build --release --locked
	STOWAGE_BIN=$(CARGO_TARGET_DIR)/release/stowage STOWAGE_ATTACKS=1 $(call pytest,attacks) -s

test-attacks-short: build tools moto ## Seconds of each attack, against the debug build
	$(call pytest,attacks)

test-drift: build tools moto ## Drift and expiration, with simulated EC2 and with moto; static NodePools; repair and volumes; purchases in vain
	$(call pytest,drift static_pools node_lifecycle purchases)

test-disruption: build tools moto ## Every reason of disruption at once, consolidation beside obstacles, fail-over to another replica
	$(call pytest,disruption failover) -s

test-monitoring: build tools moto ## A real Prometheus scrapes the service: expressions of Karpenter's users, promtool (STOWAGE_DASHBOARDS=FOLDER for dashboards and alerts of others)
	$(call pytest,monitoring) -s

test-karpenter-short: build tools moto ## A few specs of Karpenter's own end-to-end suite
	$(call pytest,karpenter_suites)

# Most of the time of a spec is waiting: three parts run side by side.
KARPENTER_PART_1 := [Chaos or [Expiration or [Integration or [Termination
KARPENTER_PART_2 := [Drift
KARPENTER_PART_3 := not ($(KARPENTER_PART_1) or $(KARPENTER_PART_2))
SUBJECT := stowage
KARPENTER_RESULTS = $(CARGO_TARGET_DIR)/karpenter-suite-$(SUBJECT).jsonl
.PHONY: test-karpenter test-karpenter-short test-karpenter-1 test-karpenter-2 test-karpenter-3
test-karpenter: build tools moto ## All of them, with the results in a file (SUBJECT=karpenter: of Karpenter itself)
	@rm -f $(KARPENTER_RESULTS)
	$(MAKE) -j3 -k --output-sync=target test-karpenter-1 test-karpenter-2 test-karpenter-3; status=$$?; echo "results: $(KARPENTER_RESULTS)"; exit $$status

test-karpenter-1 test-karpenter-2 test-karpenter-3: test-karpenter-%: build tools moto
	STOWAGE_SUITE=all STOWAGE_SUITE_SUBJECT=$(SUBJECT) STOWAGE_SUITE_RESULTS=$(KARPENTER_RESULTS) $(call pytest,karpenter_suites) -k "$(KARPENTER_PART_$*)"

test-swap: build tools moto ## From Karpenter's real controller to Stowage and back, with moto
	$(call pytest,swap)

test-e2e: build tools moto ## The whole service, with the real kube-scheduler (test-e2e-CLASS: one class of e2e/e2e_test.py)
	$(call pytest,e2e)

test-moves: build tools moto ## Moves of pods; interruptions of many nodes
	$(call pytest,moves interruptions)

$(E2E:%=test-e2e-%): test-e2e-%: build tools moto
	$(call pytest,e2e)::Test$*

bench: ## Cost, time and memory compared with Karpenter's, as a table and a plot (BENCH=--ours-only is quick)
	cargo build --release --locked
	$(PYTHON) benches/bench.py --binary $(CARGO_TARGET_DIR)/release/stowage --out $(CARGO_TARGET_DIR)/bench $(BENCH)
	cargo bench --locked --quiet --bench incremental | tee $(CARGO_TARGET_DIR)/bench/incremental.md
	$(PYTHON) benches/worst_cases.py --binary $(CARGO_TARGET_DIR)/release/stowage | tee $(CARGO_TARGET_DIR)/bench/worst_cases.md
	set -o pipefail; for order in "" --by-workload; do $(PYTHON) benches/arrivals.py --binary $(CARGO_TARGET_DIR)/release/stowage $$order || exit 1; done | tee $(CARGO_TARGET_DIR)/bench/arrivals.md
	$(MAKE) bench-state bench-launches

bench-launches: tools moto ## Calls per 1,000 launches and time from plan to CreateFleet, of the release build against moto
	cargo build --release --locked
	@mkdir -p $(CARGO_TARGET_DIR)/bench && rm -f $(CARGO_TARGET_DIR)/bench/launches.json
	STOWAGE_BIN=$(CARGO_TARGET_DIR)/release/stowage STOWAGE_EC2_FIGURES=$(CARGO_TARGET_DIR)/bench/launches.json $(call pytest,ec2)::TestLaunches
	set -o pipefail; $(PYTHON) benches/launches.py $(CARGO_TARGET_DIR)/bench/launches.json | tee $(CARGO_TARGET_DIR)/bench/launches.md

bench-state: ## Memory, CPU per event and cost of each loop with 10,000 nodes and 100,000 pods
	@mkdir -p $(CARGO_TARGET_DIR)/bench
	cargo bench --locked --quiet --bench state | tee $(CARGO_TARGET_DIR)/bench/state.md

bench-api: tools moto ## Calls to a real API server per minute with 2,000 nodes and 20,000 pods of kwok (BENCH="--nodes 50" is quick)
	cargo build --release --locked
	STOWAGE_BIN=$(CARGO_TARGET_DIR)/release/stowage $(E2E_PYTHON) e2e/bench_api.py $(BENCH)

bench-karpenter: tools moto ## Karpenter's own performance suite, against Stowage and against Karpenter, for hours (BENCH="--focus Basic" for less)
	cargo build --release --locked
	@mkdir -p $(CARGO_TARGET_DIR)/bench && rm -f $(CARGO_TARGET_DIR)/bench/karpenter-suite-*.jsonl
	for subject in stowage karpenter; do STOWAGE_BIN=$(CARGO_TARGET_DIR)/release/stowage $(E2E_PYTHON) e2e/karpenter_performance.py run $$subject --out $(CARGO_TARGET_DIR)/bench/karpenter-suite-$$subject.jsonl $(BENCH) || exit 1; done
	$(E2E_PYTHON) e2e/karpenter_performance.py table $(CARGO_TARGET_DIR)/bench/karpenter-suite-stowage.jsonl $(CARGO_TARGET_DIR)/bench/karpenter-suite-karpenter.jsonl

quick: lint test-scenarios ## The inner loop: lints, plans of every scenario kind, unit tests, layers, the built binary, HTTP and TLS, generated pages
	cargo test --locked --quiet --lib --test architecture --test integration

reference: ## Regenerate the pages of docs/reference that are rendered from the code
	STOWAGE_REGENERATE=1 cargo test --locked --quiet --test integration reference_pages

crds: ## Regenerate crds/ from src/api, and the copies of it
	STOWAGE_REGENERATE=1 cargo test --locked --quiet --package stowage-api --lib crds
	charts/sync-crds
	webhook-config/generate

clean-cache: ## Delete everything that was built or installed outside the checkout
	rm -rf $(CACHE)
