# Two commands for a newcomer, `make demo` and `make test`; two for a developer, `make check` and `make format`.
# Each creates .venv on first use and needs nothing but make and Python >= 3.11 (PYTHON=/path/to/python chooses one).

.PHONY: demo test integrations matrix check format clean
.DEFAULT_GOAL := demo

BIN := .venv/bin
INSTALLED := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CPU_WHEELS := https://download.pytorch.org/whl/cpu

demo: $(INSTALLED)
	@$(BIN)/python -m examples.demo.demo

test: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 4 --dist worksteal

# Installs the frameworks, most of a GB, and trains under each; starts folders by mpirun and Slurm where Debian's
# openmpi-bin, slurm-wlm and munge are installed. CI does not run it. torchtitan wants an spmd_types of its own and triton;
# of Megatron-LM the core's configs are used; DeepSpeed is built against the torch that is here, without kernels.
integrations: $(INSTALLED)
	@$(PIP) install -c constraints.txt -e '.[integrations]'
	@$(PIP) install torchtitan==0.3.0 triton
	@$(PIP) install --no-deps megatron-core==0.16.1
	@DS_BUILD_OPS=0 $(PIP) install --no-build-isolation deepspeed==0.19.8
	@OMP_NUM_THREADS=1 AUTOPAR_INTEGRATIONS=1 $(BIN)/python -m pytest -q tests/integrations tests/test_launch.py

# What installs: torch and transformers, old and new, each in an environment of its own. Up to 6 GB a torch.
TORCH ?= 2.13.0
matrix: $(INSTALLED)
	@$(BIN)/python -m benchmarks.install_matrix --torch $(TORCH)

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict -p autopar -p examples.demo -p tests -p benchmarks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/test_house.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv build out *.egg-info .mypy_cache .ruff_cache .pytest_cache

# The stamp is as new as what it was installed from, so a present .venv is used as it is. Linux without an NVIDIA driver
# takes torch from the CPU wheels first: the default ones bring some gigabytes of CUDA that would never be used.
$(INSTALLED): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	    for python in $(or $(PYTHON),python3.13 python3.12 python3.11 python3); do \
	        $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; python=; \
	    done; \
	    if [ -z "$$python" ]; then \
	        echo "autopar needs Python >= 3.11 with venv; none of $(or $(PYTHON),python3.13 python3.12 python3.11 python3) is one." >&2; \
	        echo "Install one (Debian, Ubuntu: python3-venv too), or name it: make PYTHON=/path/to/python" >&2; exit 1; \
	    fi; \
	    echo "Creating .venv with $$python" && $$python -m venv .venv; \
	fi
	@echo "Installing autopar and its tools into .venv (a few minutes the first time)"
	@if [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null && ! $(BIN)/python -m pip show -q torch 2>/dev/null; then \
	    $(PIP) install --retries 0 --timeout 15 --no-deps -c constraints.txt --index-url $(CPU_WHEELS) torch 2>/dev/null \
	        || echo "$(CPU_WHEELS) is out of reach; taking torch from pip's own index"; \
	fi
	@$(PIP) install -c constraints.txt -e '.[hf,dev]'
	@echo "Compiling the search's kernels (about a minute, once)"
	@$(BIN)/python -m autopar.search.warm
	@touch $@
