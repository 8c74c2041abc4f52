"""Measurements on a GPU: check a result first, then time the same call, and save the row.

No speed is recorded unless the same command found the result correct. Layers are compared with
fp64, whole models with fp32, and training steps with dense ones; a wrong result ends the command.
Providers are timed in turns, since a GPU's clock falls while it works. Each row names the device,
versions, commit and command.

    patterns, imposed   layers and models of a known activity
    case, check         a layer's inputs; what is exact for them, and one table of tolerances
    clock, costs        times, energy and kernels; operations, bytes and the roofline
    providers, rows     names and columns of data/bench
    tune                the paths of a model's layers, for good
    layer, calibration  inference of one layer, and the times that "auto" chooses by
    step, trainer       training: one layer forward and backward, one optimiser step of a model
    grid                a few cases of one layer in both, for a device that nobody measured yet
    serving             requests a second of transformers' continuous batching
    precision           what FP8 costs in cross-entropy, on any device
    sides, model, parts, decode
                        whole models: forward passes, layers, a layer's kernels, decoding

The public functions load at first use: importing twell.measure.providers loads no torch.
"""

from twell.lazy import hand_on

__getattr__, __dir__, __all__ = hand_on(
    __name__,
    {
        ".calibration": "calibrate calibration_levels",
        ".check": "Exact TOLERANCE",
        ".clock": "kernel_name",
        ".costs": "ceilings kernel_formulas roofline work",
        ".grid": "small_grid",
        ".layer": "ffn",
        ".model": "language_model",
        ".patterns": "Pattern imposed_layer permuted recorded_masks synthetic_layer",
        ".providers": "Provider",
        ".precision": "quality",
        ".rows": "COLUMNS",
        ".serving": "Load serve",
        ".sides": "Compiled",
        ".step": "crossover ffn_steps",
        ".trainer": "train_step",
    },
)
