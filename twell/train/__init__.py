"""Training with an L1 term on the feed-forward activations.

The recipe is the paper's Table 2: AdamW, linear warm-up and cosine decay to zero, gradient
clipping. The L1 term is added to the cross-entropy, and nothing else differs from a dense
baseline. Accelerate spreads a step over processes: DDP, or FSDP2 by `accelerate launch --use_fsdp
--fsdp_version 2`. Seed and step alone decide which text a step draws.

    start           `train`: checks the folder, holds its lock, runs the loop
    loop            the run: steps, rows, validations, checkpoints
    build           model, compilation, optimiser
    text            the tokens of a run, which must not change under it
    validation      loss and activity of a model on held-out text
    dead            dead neurons: windows and remedies
    relufy          a pretrained model that learns from itself, with ReLU
    fit             how it begins: least squares, layer after layer
    steer           what brings its activity to the wanted share
    log             the rows of log.csv
    checkpoint      the last two checkpoints, and which of them is whole
    interrupt, lock Ctrl-C, and one process at a time in a folder

The public functions load at first use.
"""

from twell.lazy import hand_on

__getattr__, __dir__, __all__ = hand_on(
    __name__,
    {
        "twell.config": "CONFIGS TrainConfig cache_folder l1_schedule",
        ".dead": "DeadWindow balance reinitialize",
        ".fit": "fit_down",
        ".log": "Log activity_columns",
        ".relufy": "Student relufy_config",
        ".start": "check_folder train",
        ".text": "run_text text_hashes",
        ".validation": "evaluate",
    },
)
