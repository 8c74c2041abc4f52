"""Measurements on a GPU: check a result first, then time the same call, and save the row.

No speed is recorded unless the same command found the result correct. Layers are compared with
fp64, whole models with fp32, and training steps with dense ones; a wrong result ends the command.
Providers are timed in turns, since a GPU's clock falls while it works. Each row names the device,
versions, commit and command.

    providers, rows     names and columns of data/bench
    imposed             layers and models of a known activity
    check               exact results, and one table of tolerances
    runner              `bench`: checks, turns, CUDA graphs, energy, kernels
    layer               one layer by each provider, forward and in training
    calibration         the times that "auto" chooses by; `tune` fixes the paths of a model
    sides, model, decode
                        whole models: forward passes, layers, decoding
    trainer             one optimiser step of a model
    serving             two servers of vLLM, dense and sparse, timed by its own benchmark
    precision           the cross-entropy that FP8 costs, on any device

The public functions load at first use: importing twell.measure.providers loads no torch.
"""

from twell.lazy import hand_on

__getattr__, __dir__, __all__ = hand_on(
    __name__,
    {
        ".calibration": "calibrate crossover",
        ".layer": "ffn",
        ".model": "language_model",
        ".imposed": "synthetic_layer",
        ".precision": "quality",
        ".serving": "serve",
        ".trainer": "train_step",
    },
)
