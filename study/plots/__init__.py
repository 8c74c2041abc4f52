"""One function a figure: a table from study.analysis in, a Figure out, which `save` writes.

No file is read here. In all figures L1 = 0 is black, and levels above it run from dark to light.
Each module stands on `base` alone:

    base      the style, colours and sizes of all figures, and saving them
    formats   the formats (Fig. 1)
    training  sweeps, choices of training and sizes (Figs 2, 3, 8, 9)
    longer    outcomes over training tokens and over time; stands on `training`, too
    activity  layers, tokens and neurons (Figs 6, 7, 10, 11)
    speed     a layer's speed
    models    whole models: tasks, speed, energy and memory (Figs 3 to 6, 10, 11, Tables 1 and 6)
    parts     a decoder layer's parts, and decoding; stands on `models` and `speed`, too
    precision the speed of FP8 against its quality; stands on these two, too
    relufied  pretrained models that became sparse
    clusters  what a training would cost on many GPUs
    glance    the picture at the top of README

The package hands on their public names: `from twell import plots`, then `plots.frontier`.
"""

from twell.lazy import hand_on

__getattr__, __dir__, __all__ = hand_on(
    __name__,
    {
        ".activity": "fig06_layers fig07a_tokens fig07b_positions "
        "fig_around_word fig_passage fig_silenced fig_specific fig_surprise",
        ".base": "ACTIVE_FLOOR AUTO BLUE COLUMN DECODE DENSE DOWN GATE GREEN HYBRID "
        "ORANGE OURS PAPER PURPLE RED ROWWISE SPARSE UP png save",
        "twell.inspector.figure": "FIXED_WIDTH LINE PAGE PALETTES fig_inspector style visible",
        ".clusters": "cluster_costs",
        ".formats": "fig01_bytes fig01_formats",
        ".glance": "overview",
        ".keep": "Keep",
        ".longer": "over_tokens race",
        ".models": "ACTIVITY SIDES fig03_accuracy fig04_levels fig05_levels fig06_contributions "
        "paired_tasks table1_scale table6_tasks",
        ".parts": "model_decode model_parts",
        ".precision": "fp8_quality",
        ".relufied": "gains_by_share relufied_course relufied_frontier relufied_price "
        "relufied_tasks relufied_tokens",
        ".speed": "DENSE_FP8 NAMES NEAR PROVIDERS SPARSE_FP8 STYLES ffn_activity ffn_roofline "
        "ffn_tokens training_activity",
        ".training": "BACKENDS CHOICES STATUS_MARKERS choices_frontier computed_otherwise "
        "fig03_frontier fig02_training_curves fig08_remedies "
        "fig09_activity_over_training frontier scale_activity",
    },
)
