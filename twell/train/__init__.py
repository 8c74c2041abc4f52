"""Training with an L1 term on the feed-forward activations.

The recipe is the paper's Table 2: AdamW, linear warm-up and cosine decay to zero, gradient
clipping. The L1 term is added to the cross-entropy, and nothing else differs from a dense
baseline. Accelerate spreads a step over processes: DDP, or FSDP2 by `accelerate launch --use_fsdp
--fsdp_version 2`. The seed and the number of a step decide its text.

    start           `train`: holds the lock of the folder, checks it, runs the loop
    loop            the run: model, optimiser, steps, rows, validations, Ctrl-C
    text            the tokens of a run and their hashes; loss and activity on held-out text
    dead            dead neurons: windows and remedies
    steer           steers activity to the wanted share
    relufy          a pretrained model that learns from itself, with ReLU
    checkpoint      the last two checkpoints

The public functions load at first use.
"""

from twell.lazy import hand_on

__getattr__, __dir__, __all__ = hand_on(
    __name__,
    {
        "twell.config": "CONFIGS TrainConfig cache_folder l1_schedule",
        ".loop": "Log activity_columns",
        ".dead": "DeadWindow balance reinitialize",
        ".relufy": "Student relufy_config",
        ".start": "train",
        ".text": "evaluate run_text text_hashes",
    },
)
