"""One function a figure: a table from twell.analysis in, a matplotlib Figure out, and `save`, which writes it.

No file is read here. In all figures L1 = 0 is black, and levels above it run from dark to light. Each module stands on `base` alone:

base      the style, colours and sizes of all figures, and saving them
formats   the formats (Fig. 1)
training  sweeps, choices of training and sizes (Figs 2, 3, 8, 9)
activity  layers, tokens and neurons (Figs 6, 7, 10, 11)
speed     a layer's speed
models    whole models: tasks, speed, energy and memory (Figs 3 to 6, 10, 11, Tables 1 and 6)
overview  the picture at the top of README

Public names are all to be had from here: `from twell import plots`, then `plots.frontier`.
"""

from __future__ import annotations

from twell.plots.activity import (
    FIXED_WIDTH,
    LINE,
    PALETTES,
    fig06_layers,
    fig07a_tokens,
    fig07b_positions,
    fig_inspector,
    fig_passage,
    fig_silenced,
    fig_specific,
    fig_surprise,
    visible,
)
from twell.plots.base import (
    ACTIVE_FLOOR,
    BLUE,
    COLUMN,
    DRAWN_WITH,
    GREEN,
    MODULES,
    ORANGE,
    PAGE,
    PURPLE,
    RED,
    save,
    style,
)
from twell.plots.formats import (
    fig01_bytes,
    fig01_formats,
)
from twell.plots.keep import Keep
from twell.plots.models import (
    ACTIVITY,
    SIDES,
    fig03_accuracy,
    fig04_levels,
    fig05_levels,
    fig06_contributions,
    model_decode,
    model_parts,
    table1_scale,
    table6_tasks,
)
from twell.plots.overview import overview
from twell.plots.speed import (
    NEAR,
    PROVIDERS,
    STYLES,
    ffn_activity,
    ffn_roofline,
    ffn_tokens,
    training_activity,
    training_devices,
)
from twell.plots.training import (
    CHOICES,
    STATUS_MARKERS,
    choices_frontier,
    computed_otherwise,
    fig02_training_curves,
    fig03_frontier,
    fig08_remedies,
    fig09_activity_over_training,
    frontier,
    scale_activity,
)
