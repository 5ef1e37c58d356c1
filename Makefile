# make up        install what is needed, capture what runs and what starts to, mount the store
#                at $(MOUNTPOINT)
# make down      end that: unmount, follow no more; the store is kept
# make install   put the command, manual pages and units for systemd below $(PREFIX)
# make uninstall  take them away again; the store is kept
# make deb       build a package for the Debian release of this machine in $(DIST), or for RELEASE
#                (bookworm, trixie) in a new root
# make test-deb  install, upgrade and purge that package in a new root with systemd
# make test-kernels  boot Debian's kernels under QEMU and use that package there; KERNELS="6.1 5.10"
# make release   build the sdist, the wheel and a package for each Debian release, with SHA256SUMS,
#                in $(DIST)
# make image     build an image for podman, Docker or Kubernetes from that package
# make test-image  run it: capture this host, be killed, start anew
# make test-pod  run it as the pod of examples/daemonset.yaml, by containerd, with crictl
# make clean     remove what the other targets have made here; not while `make up` runs
# make test      install what the tests need and run all of them
# make check     ruff, mypy --strict, import layers
# make test-page  install Chromium and programs from npm, and test `serve` with them
# make fuzz      give everything that takes bytes of strangers bad ones, for FUZZ_SECONDS (600)
# make bench     measure against the bars in benchmarks/RESULTS.md
# make bench-capture  the part of it that is about live capture
# make test-fresh  make up, test and check in a new Debian root that has only git, make, python3

STORE ?= /var/lib/buildidfs
MOUNTPOINT ?= /buildid
PREFIX ?= /usr/local
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FUZZ_SECONDS ?= 600
DIST ?= dist
export STORE MOUNTPOINT FUZZ_SECONDS

.PHONY: help up down install uninstall test test-page check fuzz bench bench-capture test-fresh \
	deb test-deb test-kernels release image test-image test-pod clean

# What comes first is made when nothing is named: it must not be what starts to follow this host.
help:
	@sed -n '/^#/!q; s/^# //p' Makefile

up: $(VENV)/.user
	scripts/up $(BIN)/buildidfs

down:
	scripts/down $(BIN)/buildidfs

install:
	scripts/install-packages run
	scripts/install $(PYTHON) $(PREFIX)

uninstall:
	scripts/install remove $(PREFIX)

test: $(VENV)/.dev
	scripts/install-packages test
	scripts/run-tests $(BIN)/pytest $(PYTEST_ARGS)

test-page: $(VENV)/.dev
	scripts/install-packages page
	npm install --no-save --no-audit --no-fund --prefix $(VENV)/axe axe-core@4 node@24 \
		@firefox-devtools/profiler-cli@0.10
	$(BIN)/pytest tests/browser $(PYTEST_ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fuzz: $(VENV)/.fuzz
	$(BIN)/python -m tests.fuzz $(FUZZ_TARGETS)

bench: $(VENV)/.dev
	scripts/install-packages bench
	$(BIN)/python -m benchmarks.run $(BENCH_ARGS)

bench-capture: $(VENV)/.dev
	scripts/install-packages bench
	$(BIN)/python -m benchmarks.run $(BENCH_ARGS) capture capture-busy capture-known capture-peer \
		capture-writers capture-flood watch-perf watch-spawn watch-compile watch-syscalls \
		watch-memory

test-fresh:
	scripts/test-fresh

deb:
	[ "$(RELEASE)" ] || scripts/install-packages build
	scripts/make-deb $(DIST) $(RELEASE)

release:
	scripts/make-release $(DIST)

image: deb
	scripts/make-image $(DIST)

test-image:
	scripts/test-image

test-pod:
	scripts/test-pod

test-deb: deb
	scripts/test-deb "$$(ls -t $(DIST)/buildidfs_*.deb | head -n 1)"

test-kernels: deb
	scripts/install-packages kernels
	scripts/test-kernels $(DIST) $(KERNELS)

# The stamps make every target work twice in a row without the network.
$(VENV)/.user: pyproject.toml scripts/install-packages scripts/make-venv
	scripts/install-packages run
	scripts/make-venv $(PYTHON) $(VENV) all
	touch $@

$(VENV)/.dev: pyproject.toml scripts/install-packages scripts/make-venv
	scripts/install-packages run
	scripts/make-venv $(PYTHON) $(VENV) all,dev
	touch $(VENV)/.user $@

$(VENV)/.fuzz: pyproject.toml scripts/install-packages scripts/make-venv
	scripts/install-packages run
	scripts/make-venv $(PYTHON) $(VENV) all,dev,fuzz
	touch $(VENV)/.user $(VENV)/.dev $@

clean:
	scripts/clean $(VENV) .fuzz .kernels .mypy_cache .pytest_cache .ruff_cache .hypothesis \
		.import_linter_cache
