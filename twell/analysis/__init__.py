"""Tables behind the figures: from runs, logs, traces, measured rows and evaluations to DataFrames, and nothing else.

Everything here is a count, a mean or a ratio of what a run logged, a trace or an aggregate stored or a call measured.
Nothing reads files or draws. Each module stands on those above it alone:

runs      what each run came to, an L1 sweep by level, curves over training
variants  other choices of training, other sizes and ways to compute, and what seeds alone explain
activity  a trace or an aggregate by layer, token, position and neuron
formats   the formats cell by cell, and their bytes
speed     measured layers, training steps and whole models over dense
tasks     accuracies of downstream tasks
trained   quantities of runs: the numbers behind the claims, by name
counted   quantities of formats, traces and evaluations
measured  quantities of measured rows
quantities  all of these by subject (`analysis.quantities.sweep`), and `recorded`: those of data/
claims    the paper's claims beside ours, from claims.yaml (`analysis.claims.table`)

Public names are all to be had from here: `from twell import analysis`, then `analysis.sweep`.
`quantities` and `claims` are handed on as modules; `quantities.recorded` alone reads data/.
"""

from __future__ import annotations

from twell.analysis import claims, quantities
from twell.analysis.activity import (
    by_neuron,
    by_position,
    by_surprise,
    contexts,
    firing,
    passage,
    per_layer,
    per_token,
    places,
    specific,
    surprise,
    surprise_correlation,
    tile_overflow,
    together,
    union_sizes,
    value_histogram,
)
from twell.analysis.bench import Bench
from twell.analysis.formats import (
    format_bytes,
    format_cells,
)
from twell.analysis.runs import (
    MAX_PRICE,
    MAY_DIFFER,
    MIN_FFN_GAIN,
    MIN_LAYER_ACTIVE,
    RECIPE,
    STATUSES,
    activity_at,
    check_alike,
    choice,
    cross_entropy_change,
    level_name,
    levels,
    list_runs,
    logged_layers,
    price_at,
    readable,
    recommended,
    settles_after,
    sweep,
    training_curves,
)
from twell.analysis.speed import (
    BASELINE,
    CALL,
    CASE,
    MODEL_CASE,
    SAME_ACTIVE,
    SCALE,
    STEP_CASE,
    WRITTEN_BY,
    at_level,
    by_case,
    correlation,
    crossovers,
    decode_speedups,
    layer_contributions,
    layer_parts,
    layers_at,
    level_gains,
    model_speedups,
    roofline,
    scale_table,
    short,
    speedups,
    step_speedups,
    training_crossover,
    training_speedups,
)
from twell.analysis.tasks import (
    COMPUTED,
    EVALUATED,
    MEAN,
    NEAR_CHANCE,
    SIZE,
    TASKS,
    accuracies,
    across_sizes,
    against_dense,
    backend_differences,
    by_level,
    evaluations,
    paper_levels,
    paper_tasks,
    seven_tasks,
    several_levels,
)
from twell.analysis.variants import (
    CONFIDENCE,
    QUANTITIES,
    UNKNOWN,
    against_frontier,
    choice_table,
    choices,
    compared_level,
    computed_curves,
    computed_otherwise,
    contrast,
    contrasts,
    noise_limit,
    noise_verdict,
    paper_sizes,
    remedied,
    seed_noise,
    sizes,
)
