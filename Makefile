# `make help` lists the targets. Each sets up what it needs through scripts/setup.sh.
.DEFAULT_GOAL := help
SHELL := /usr/bin/env bash

PROGRAMS := gateway vllmsim replay demo
GO_TEST_FLAGS ?= -race -timeout 20m
# Where make replay finds the trace; any file in Mooncake's format does.
TRACE ?= $(if $(PREFIXGATE_SHARED),$(PREFIXGATE_SHARED),../shared)/traces/mooncake_conversation.jsonl

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-14s %s\n", $$1, $$2}'

.PHONY: demo
demo: build ## simulated replicas, real traffic: what prefix routing gains over round robin
	./bin/demo

.PHONY: test
test: setup-test ## every test, with the race detector, on real parts
	go test $(GO_TEST_FLAGS) ./...

.PHONY: build
build: native ## the programs, into bin/
	@mkdir -p bin
	go build -o bin/ $(addprefix ./cmd/,$(PROGRAMS))

.PHONY: run
run: build ## the gateway; ARGS="--model … --replica …"
	./bin/gateway $(ARGS)

.PHONY: native
native: ## the native library: tokenizers and chat templates
	@scripts/setup.sh build

.PHONY: check
check: lint test ## all that CI runs: format, lint, vet, tests under -race

.PHONY: lint
lint: native ## format, vet and lint, without changing a file
	@scripts/setup.sh lint
	@files=$$(.cache/bin/golangci-lint fmt --diff); if [ -n "$$files" ]; then echo "$$files"; echo "make fmt mends the format"; exit 1; fi
	go vet ./...
	.cache/bin/golangci-lint run ./...

.PHONY: fmt
fmt: ## format every Go file
	@scripts/setup.sh lint
	.cache/bin/golangci-lint fmt

.PHONY: setup-test
setup-test:
	@scripts/setup.sh test

.PHONY: bench
bench: bench-tokens bench-index bench-route ## all benchmarks below, a line `name value unit` per figure

.PHONY: bench-tokens
bench-tokens: setup-test ## encoders and the chunk cache, one core each
	go run ./scripts/bench-tokens

.PHONY: bench-index
bench-index: setup-test ## lookups and records against a real redis-server
	go run ./scripts/bench-index

.PHONY: bench-route
bench-route: native ## time and allocations of a routing decision
	go run ./scripts/bench-route

.PHONY: replay
replay: build ## the public trace over every policy, in virtual time; TRACE=FILE
	./bin/replay -trace $(TRACE) -policy all -replicas 8 -prefill-rate 8000 -cache-blocks 2000 \
		-gateways 4 -staleness 100ms -seed 1 -json bin/replay.json -html bin/replay.html

.PHONY: clean
clean: ## what was built here; caches stay
	rm -rf bin native/lib native/target
