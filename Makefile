# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each makes its own virtual environment first.

PYTHON ?= python3
VENV ?= .venv
# The version the tests run with. Where your index only has builds for GPUs and you want the small one for the
# CPU, install that into $(VENV) first.
TORCH ?= torch==2.13.0

# Processes that tests run in.
JOBS ?= 2

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-cpu test-emulated lint docs matrix registry clean

demo: $(READY)
	$(BIN)/tpu-kernels emulate examples/load_and_swap.py
	mkdir -p demo
	$(BIN)/tpu-kernels bench decode --model preset:qwen3-moe \
	  --experts tpu_fused_experts+loop,tpu_fused_experts,stock,tpu_grouped_mm,eager --batch 1,8 \
	  --prompt-length 64 --new-tokens 32 --repeats 3 \
	  --device emulated --json demo/decode.json --plot demo/decode.png --html demo/decode.html

test: test-cpu test-emulated

# On the CPU: the references, the kernels interpreted, the real TPU compiler, everything around them.
test-cpu: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# The same ops, models and integrations on the real torch_tpu, emulated.
test-emulated: $(READY)
	TPU_KERNELS_EMULATE=1 $(BIN)/python -m pytest -m "device and not slow" -n $(JOBS) --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site, in site/; a warning is an error.
docs: $(READY)
	$(BIN)/mkdocs build

# The real TPU compiler on every shipped kernel, generation and case: minutes, less with what is in the cache.
matrix: $(READY)
	$(BIN)/python -m benchmarks.compile_matrix

# After a change to a kernel or to tpu_kernels/ops, which travels inside kernels.
registry: $(READY)
	for project in kernels_src/*/build.toml; do $(BIN)/tpu-kernels golden $$(dirname $$project) || exit 1; done
	$(BIN)/tpu-kernels build kernels_src --registry registry

clean:
	rm -rf $(VENV) demo site

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@
