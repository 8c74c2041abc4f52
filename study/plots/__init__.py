"""One function a figure: tables of study.analysis in, a Figure out, which `save` writes.

    base      style, colours, captions and legends; `save` and `Keep`
    formats   the formats (Fig. 1)
    training  sweeps, choices, sizes, tokens and races (Figs 2, 3, 8, 9); pretrained models
    activity  layers, tokens and neurons (Figs 6, 7)
    speed     the speed of a layer, and FP8 against its quality
    models    tasks, speed, energy and memory of whole models (Figs 4 to 6, Table 1)

No file is read here. In all figures L1 = 0 is black, and levels above it run from dark to light.
"""

from twell.lazy import hand_on

__getattr__, __dir__, __all__ = hand_on(
    __name__,
    {
        ".activity": "fig06_layers fig07a_tokens fig07b_positions fig_around_word fig_passage "
        "fig_silenced fig_specific fig_surprise",
        ".base": "Keep png save",
        ".formats": "fig01_bytes fig01_formats",
        ".models": "fig04_levels fig05_levels fig06_contributions model_decode model_parts "
        "overview paired_tasks table1_scale",
        ".speed": "ffn_activity ffn_tokens fp8_quality training_activity",
        ".training": "fig02_training_curves fig03_frontier fig08_remedies "
        "fig09_activity_over_training over_tokens race relufied_frontier scale_activity",
    },
)
