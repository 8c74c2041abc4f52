# make reproduce   run the notebooks on what is recorded in data/, and train a small sweep and draw it alike
# make site        the documents, the lessons and an atlas of the shipped model in build/site, which opens from disk
# make lessons     the notebooks and what they show as pages in docs/lessons, for who changes them
# make test        the tests (MARK=slow, MARK=browser or MARK=vllm: those instead)
# make installed   the package from a wheel in an empty folder: train, export, load, serve as a layer
# make fuzz        all tests and random cases of the layer, on fresh inputs (SEED=number repeats them)
# make lab         open the notebooks in JupyterLab
# make screenshot  draw the picture of the inspector again (needs chromium)
# make clean       remove what these made (not the environment in .venv, nor what you trained, measured or evaluated)
# reproduce, site, test, fuzz and lab set up .venv by themselves, once; MARK=slow and fuzz also the older Triton in .venv/triton-older.

MARK ?= not slow and not browser
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
RUN := TWELL_CACHE=build/cache HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TQDM_DISABLE=1 $(BIN)/python

# glibc gives freed memory back at once and takes it anew; keeping it saves a fifth of a training step on a CPU.
TRAIN := OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296 $(RUN)

# The small sweep, which trains here: one run a level of the L1 coefficient, one core each, JOBS at a time.
LEVELS := 0 1e-3 3e-3 3e-2
LIVE := runs/live
TRACED := $(LIVE)/l1-3e-3
TRAINING := $(wildcard $(addprefix twell/,sparse/*.py models/*.py corpus/*.py train/*.py)) $(addprefix twell/,config.py results.py configs/quick.yaml)
DRAWING := $(wildcard study/*.py study/*/*.py twell/trace/*.py) $(addprefix twell/,results.py tables.py sparse/formats.py) data/paper.yaml data/claims.yaml
RECORDED := $(basename $(notdir $(wildcard notebooks/*.ipynb)))
LIVELY := 02_sparsity 03_layerwise 04_tokens 07_inspect $(if $(shell command -v nvidia-smi),05_speedup)
NOTEBOOKS := $(RECORDED:%=build/notebooks/%.ipynb)

.PHONY: reproduce figures site lessons test installed fuzz lab screenshot clean
.DELETE_ON_ERROR:

reproduce: $(VENV)/installed
	@$(MAKE) --no-print-directory -j$(JOBS) figures
	@echo "Figures are in figures/ and figures/live/, the executed notebooks in build/notebooks/."

figures: $(NOTEBOOKS) $(LIVELY:%=build/notebooks/live/%.ipynb)

# $(1): parameters.
define execute
	@mkdir -p $(@D)
	@OMP_NUM_THREADS=1 MPLCONFIGDIR=build/matplotlib $(RUN) -W ignore scripts/execute.py $< $@ $(1)
endef

build/notebooks/%.ipynb: notebooks/%.ipynb $(DRAWING) scripts/execute.py $(wildcard data/runs/*/log.csv* data/bench/*.csv data/traces/* data/eval/* data/checkpoints/*/*)
	$(call execute,figures=figures)

# These run the model that ships.
build/notebooks/04_tokens.ipynb build/notebooks/06_downstream.ipynb build/notebooks/07_inspect.ipynb build/notebooks/10_one_word.ipynb: $(wildcard twell/models/*.py twell/sparse/*.py)
build/notebooks/07_inspect.ipynb build/notebooks/10_one_word.ipynb: $(wildcard twell/inspector/*.py twell/inspector/browser/*)
build/notebooks/06_downstream.ipynb: $(wildcard twell/evaluate/*.py twell/tasks/*/*)

build/notebooks/live/%.ipynb: notebooks/%.ipynb $(DRAWING) scripts/execute.py
	$(call execute,live=true figures=figures/live/small live_figures=figures/live/small)

build/notebooks/live/02_sparsity.ipynb build/notebooks/live/03_layerwise.ipynb: $(LEVELS:%=$(LIVE)/l1-%/done)
build/notebooks/live/03_layerwise.ipynb build/notebooks/live/04_tokens.ipynb: $(TRACED)/aggregate.npz
build/notebooks/live/04_tokens.ipynb: $(TRACED)/trace.npz
build/notebooks/live/07_inspect.ipynb: $(TRACED)/aggregate.npz $(wildcard twell/inspector/*.py twell/inspector/browser/*)

$(LIVE)/l1-%/done: $(TRAINING) | build/cache/ready
	$(TRAIN) -m twell train quick tokens=491_520 l1_coefficient=$* --out $(@D) --overwrite
	@touch $@

$(LIVE)/l1-%/trace.npz: $(LIVE)/l1-%/done $(wildcard twell/trace/*.py)
	$(TRAIN) -m twell trace $(@D) --valid --out $@

$(LIVE)/l1-%/aggregate.npz: $(LIVE)/l1-%/done $(wildcard twell/trace/*.py)
	$(TRAIN) -m twell trace $(@D) --valid --aggregate --out $@

# The text is tokenised once, before the runs share it.
build/cache/ready: $(wildcard twell/corpus/*.py) twell/configs/quick.yaml
	@mkdir -p $(@D)
	$(RUN) -c "from twell.config import TrainConfig; TrainConfig.load('quick').prepare_text()"
	@touch $@

# docs/conf.py says which pages belong to it. A warning, such as for a link that leads nowhere, is an error.
site: $(VENV)/installed
	@rm -rf build/site
	@$(BIN)/python -m sphinx -q -E -W --keep-going -b html -c docs -d build/site-doctrees . build/site
	@$(BIN)/python -m twell atlas data/checkpoints/twell-6m --out build/site/atlas
	@echo '<meta http-equiv="refresh" content="0; url=README.html">' > build/site/index.html
	@echo build/site/index.html

lessons: $(VENV)/installed
	OMP_NUM_THREADS=1 $(RUN) scripts/lessons.py

TEST := TWELL_CACHE=$(CURDIR)/build/cache HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
test: $(VENV)/installed
	$(TEST) -m "$(MARK)"
ifeq ($(MARK),slow)
test: $(VENV)/triton-older/installed
endif

installed: $(VENV)/installed
	$(BIN)/python -m tests.installed

ifndef SEED
SEED := $(shell od -An -N3 -tu4 /dev/urandom | tr -d ' ')
endif
fuzz: $(VENV)/installed $(VENV)/triton-older/installed
	TWELL_SEED=$(SEED) $(TEST) -m "" --hypothesis-seed=$(SEED)
	TRITON_INTERPRET=1 $(RUN) -m tests.fuzz --cases 100 --seed $(SEED)
	TRITON_INTERPRET=1 $(RUN) -m tests.fuzz --cases 30 --seed $(SEED) --training

lab: $(VENV)/installed
	$(RUN) -m jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

screenshot: $(VENV)/installed
	$(RUN) -m scripts.screenshot data/checkpoints/twell-6m

clean:
	rm -rf build/cache build/lib build/matplotlib build/notebooks build/site build/site-doctrees figures/live $(LIVE)

$(VENV)/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11; set PYTHON=..."; exit 1; }
	@echo "Installing PyTorch and the other pinned packages into $(VENV): one to five minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

# Out of Python's path: tests/kernels/test_compile.py compiles the kernels with it in a process of its own.
$(VENV)/triton-older/installed: requirements.gpu.lock | $(VENV)/installed
	rm -rf $(@D) && mkdir -p $(@D)
	$(BIN)/python -m pip install -q --no-deps --target $(@D) "$$(grep ^triton== $<) ; platform_system == 'Linux'"
	@touch $@
