# make reproduce   train the small sweep, run the notebooks, draw every figure   (PROFILE=quick)
# make test        the tests
# make lab         open the notebooks in JupyterLab
# make screenshot  draw the picture of the inspector again (needs chromium)
# make clean       remove what these made (not the environment in .venv)
# reproduce, test and lab set up .venv by themselves, once.

PROFILE ?= quick
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
RUN := TWELL_CACHE=build/cache HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TQDM_DISABLE=1 $(BIN)/python

# glibc gives freed memory back at once and takes it anew; keeping it saves a fifth of a training step on a CPU.
TRAIN := OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296 $(RUN)

# The sweep: one run a level of the L1 coefficient, one core each, JOBS at a time.
LEVELS := 0 3e-4 1e-3 3e-3 1e-2 3e-2 1e-1
TRACED := 0 3e-3 3e-2
LIVE := data/live
TRAINING := $(addprefix twell/,corpus.py ffn.py model.py reference.py format.py results.py train.py) twell/configs/$(PROFILE).yaml
INSPECTED := 3e-3
DRAWING := $(addprefix twell/,analysis.py plots.py results.py trace.py format.py) data/paper.yaml
NOTEBOOKS := 01_format 02_sparsity 03_layerwise 04_tokens 05_speedup 07_inspect
RECORDED := 02_sparsity 05_speedup

.PHONY: reproduce figures test lab screenshot clean
.DELETE_ON_ERROR:

reproduce: $(VENV)/installed
	@$(MAKE) --no-print-directory -j$(JOBS) figures
	@echo "Figures are in figures/ and figures/live/, the executed notebooks in build/notebooks/."

figures: $(NOTEBOOKS:%=build/notebooks/%.ipynb) $(RECORDED:%=build/notebooks/recorded/%.ipynb)

define execute
	@mkdir -p $(@D)
	MPLCONFIGDIR=build/matplotlib $(RUN) -W ignore -m papermill --no-progress-bar --log-level ERROR --cwd . -f $(1) $< $@.part.ipynb
	@mv $@.part.ipynb $@
endef

build/notebooks/%.ipynb: notebooks/%.ipynb notebooks/profiles/$(PROFILE).yaml $(DRAWING)
	$(call execute,notebooks/profiles/$(PROFILE).yaml)

build/notebooks/recorded/%.ipynb: notebooks/%.ipynb notebooks/profiles/recorded.yaml $(DRAWING) $(wildcard data/runs/*/log.csv data/bench/*.csv)
	$(call execute,notebooks/profiles/recorded.yaml)

build/notebooks/02_sparsity.ipynb: $(LEVELS:%=$(LIVE)/l1-%/done)
build/notebooks/03_layerwise.ipynb build/notebooks/04_tokens.ipynb: $(TRACED:%=$(LIVE)/l1-%/trace.npz)
build/notebooks/07_inspect.ipynb: $(LIVE)/l1-$(INSPECTED)/aggregate.npz $(wildcard twell/inspector.* twell/widget.py)
build/notebooks/05_speedup.ipynb: $(wildcard data/bench/*.csv)

$(LIVE)/l1-%/done: $(TRAINING) | build/cache/ready
	$(TRAIN) -m twell train $(PROFILE) l1_coefficient=$* --out $(@D) --overwrite
	@touch $@

$(LIVE)/l1-%/trace.npz: $(LIVE)/l1-%/done twell/trace.py
	$(TRAIN) -m twell trace $(@D) --valid --out $@

$(LIVE)/l1-%/aggregate.npz: $(LIVE)/l1-%/done twell/trace.py
	$(TRAIN) -m twell trace $(@D) --aggregate --valid --out $@

# The text is tokenised once, before the runs share it.
build/cache/ready: twell/corpus.py twell/configs/$(PROFILE).yaml
	@mkdir -p $(@D)
	$(RUN) -c "from twell.train import TrainConfig; TrainConfig.load('$(PROFILE)').prepare_text()"
	@touch $@

test: $(VENV)/installed
	TWELL_CACHE=$(CURDIR)/build/cache HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lab: $(VENV)/installed
	$(RUN) -m jupyter lab notebooks

screenshot: $(VENV)/installed $(LIVE)/l1-$(INSPECTED)/aggregate.npz
	$(RUN) -m tests.browser $(LIVE)/l1-$(INSPECTED)

clean:
	rm -rf build figures/live $(LIVE)

$(VENV)/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@
