"""Training with an L1 term on the feed-forward activations.

The recipe is the paper's Table 2: AdamW, linear warm-up and cosine decay to zero, gradient
clipping. The L1 term is added to the cross-entropy, and nothing else differs from a dense
baseline. Accelerate spreads a step over processes: DDP, or FSDP2 by `accelerate launch --use_fsdp
--fsdp_version 2`. Seed and step alone decide which text a step draws.

    start           `train`: checks the folder, holds its lock, runs the loop
    loop            the run: steps, rows, validations, checkpoints
    build           model, compilation, optimiser
    text            the tokens of a configuration and of a run
    validation      loss and activity of a model on held-out text
    dead            dead neurons: windows and remedies
    log             the rows of log.csv
    checkpoint      the last two checkpoints, and which of them is whole
    interrupt, lock Ctrl-C, and one process at a time in a folder

The public functions load at first use.
"""

import importlib

_MODULES = {
    "twell.config": "CONFIGS TrainConfig l1_schedule",
    "twell.train.dead": "DeadWindow balance reinitialize",
    "twell.train.log": "Log activity_columns",
    "twell.train.start": "train",
    "twell.train.text": "cache_folder run_text text_hashes",
    "twell.train.validation": "evaluate",
}
_NAMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_NAMES)


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
