"""Training with an L1 term on the feed-forward activations.

The recipe is the paper's Table 2: AdamW, linear warm-up and cosine decay to zero, gradient
clipping. The L1 term is added to the cross-entropy, and nothing else differs from a dense
baseline. Accelerate spreads a step over processes: DDP, or FSDP2 by `accelerate launch --use_fsdp
--fsdp_version 2`. The seed and the number of a step decide its text.

The public functions load at first use.
"""

from twell.lazy import hand_on

__getattr__, __dir__, __all__ = hand_on(
    __name__,
    {
        "twell.config": "CONFIGS TrainConfig cache_folder l1_schedule",
        ".dead": "DeadWindow balance reinitialize",
        ".relufy": "Student relufy_config",
        ".start": "train",
        ".text": "evaluate run_text text_hashes",
    },
)
