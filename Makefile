# Everything runs in .venv, which the first command creates. PYTHON chooses the interpreter it is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := dino_sparo benchmarks studies tests main_dino.py run_with_submitit.py eval_knn.py eval_linear.py eval_finetune.py eval_image_retrieval.py eval_copy_detection.py visualize_attention.py eval_video_segmentation.py video_generation.py hubconf.py
# The environment may forbid bytecode files; without them every start compiles torch anew.
export PYTHONDONTWRITEBYTECODE=

.PHONY: help install demo demo-compare demo-clip demo-oc-clip demo-short test test-slow test-kills gpu mutants check docs format clean
.DEFAULT_GOAL := help

help:  ## list the commands
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is older than 3.10; give a newer one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "python's venv is missing; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

install: $(INSTALLED)  ## create .venv and install everything into it

demo: $(INSTALLED)  ## train on built-in scenes, evaluate, draw the slots (minutes, CPU)
	$(BIN)/dino-sparo demo

demo-compare: $(INSTALLED)  ## the same for the read-outs sparo, cls and gap
	$(BIN)/dino-sparo demo --models sparo cls gap --output_dir output/demo-compare

demo-clip: $(INSTALLED)  ## train CLIP + SPARO on the captions of built-in scenes, evaluate, draw (10 minutes on two free cores)
	$(BIN)/dino-sparo demo --method clip

demo-oc-clip: $(INSTALLED)  ## train OC-CLIP beside CLIP on the built-in scenes, evaluate, draw (10 minutes, CPU)
	$(BIN)/dino-sparo demo --method oc-clip

demo-short: $(INSTALLED)  ## all demos' parts in a few minutes; their numbers mean nothing
	$(BIN)/dino-sparo demo --short --output_dir output/demo-short
	$(BIN)/dino-sparo demo --method clip --short
	$(BIN)/dino-sparo demo --method oc-clip --short

test: $(INSTALLED)  ## run the tests that take seconds each
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow and not slurm'

# Failures are repeated once: moments are random, and other work can slow the machine down.
test-slow: $(INSTALLED)  ## run the others: several processes, a real Slurm (20 minutes)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'slow and not (alone or slurm or kills)' || \
		$(BIN)/python -m pytest -m 'slow and not (alone or slurm or kills)' --last-failed
	$(BIN)/python -m pytest -m '(alone or slurm) and not kills' || \
		$(BIN)/python -m pytest -m '(alone or slurm) and not kills' --last-failed

test-kills: $(INSTALLED)  ## kill ranks dozens of times, under torchrun and under Slurm (10 minutes)
	$(BIN)/python -m pytest -m kills || $(BIN)/python -m pytest -m kills --last-failed

# Parts that are done are skipped; ARGS="--minutes 12" runs as many as fit; `python -m benchmarks.gpu --help`.
# DINO_REFERENCE names a checkout of the reference.
gpu: $(INSTALLED)  ## test and measure what needs a GPU, write docs/gpu.md (an hour)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

# Goes on where it was ended; `tests/mutants.py --help` lists the options.
mutants: $(INSTALLED)  ## break the core modules in thousands of ways, and see what their tests miss (up to hours)
	$(BIN)/python -m pip install --quiet --editable '.[mutants]'
	nice -n 15 $(BIN)/python tests/mutants.py $(ARGS)

check: $(INSTALLED)  ## lint, format, types, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell $(SOURCES) README.md CONTRIBUTING.md CHANGELOG.md

docs: $(INSTALLED)  ## build the documentation site into site/; a broken link fails
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

format: $(INSTALLED)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv and what the demo wrote
	rm -rf $(VENV) output site
