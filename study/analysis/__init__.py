"""Tables behind the figures: runs, logs, traces, measured rows and evaluations as DataFrames.

Everything here is a count, a mean or a ratio of logged, stored or measured numbers. Nothing draws,
and only `Bench` reads files. Each module stands on those above it alone:

runs      the outcome of each run, an L1 sweep by level, curves over training
variants  other choices of training, other sizes and ways to compute, and the noise of seeds
longer    outcomes over training tokens, and the time that two trainings take to one loss
agreement where activity is, in every recorded model
activity  a trace or an aggregate by layer, token, position and neuron
words     one word and its neuron: the loss around it
formats   the formats cell by cell, and their bytes
speed     measured layers, training steps and whole models over dense
quantized the fastest in FP8 beside bf16, and its quality
clusters  what a training would cost on many GPUs
tasks     accuracies of downstream tasks
items     models beside each other on the same items
relufied  pretrained models that became sparse, their answers, and the speed of their activity

The public names are here: `from study import analysis`, then `analysis.sweep`.
"""

from twell.lazy import hand_on

__getattr__, __dir__, __all__ = hand_on(
    __name__,
    {
        ".activity": "by_neuron by_position by_surprise contexts firing kept_activity passage "
        "per_layer per_token strongest surprise surprise_correlation "
        "tile_overflow together union_sizes value_histogram",
        ".agreement": "FINDINGS PEAK_WITHIN findings groups shared",
        ".bench": "Bench",
        ".clusters": "Cluster stops_scaling training_costs",
        ".formats": "format_bytes format_cells",
        ".items": "DRAWS SCORES answer_records paired_records paired_runs",
        ".longer": "BUDGETS RACED late_gain over_tokens race reached trend",
        ".quantized": "DENSE_FP8_BY SIDES fastest fp8_quality of_fp8_calls side_of "
        "speed_and_quality",
        ".relufied": "ALIKE ASKED MANY_TOKENS ORIGINAL STUDENTS WITHOUT_L1 gains_by_share relufied_answers "
        "relufied_budgets relufied_course relufied_frontier relufied_layers "
        "relufied_outlook relufied_pairs relufied_runs",
        ".runs": "COMPUTED_BY MAX_PRICE MAY_DIFFER MIN_FFN_GAIN MIN_LAYER_ACTIVE RECIPE STATUSES "
        "activity_at alive_levels check_alike choice cross_entropy_change described fits "
        "levels price_at readable "
        "recommended settles_after sweep traced_model training_curves",
        ".speed": "BASELINE CALL CASE KERNEL_CASE MODEL_CASE SAME_ACTIVE SCALE STEP_CASE "
        "TRAINING_CASE WRITTEN_BY at_level beside_imposed by_case correlation crossovers "
        "decode_speedups layer_contributions layer_parts layers_at level_gains model_speedups "
        "near_level roofline scale_table short speedups step_speedups training_speedups",
        ".tasks": "MEAN TASKS accuracies across_sizes "
        "against_dense backend_differences by_level paper_levels paper_tasks "
        "seven_tasks several_levels",
        "twell.tables": "COMPUTED EVALUATED NEAR_CHANCE SIZE evaluations hardware last_validation "
        "level_name list_runs logged_layers processes",
        "twell.trace.neurons": "places specific",
        ".words": "MIN_SEQUENCES WHERE around_word neuron_of",
        ".variants": "CONFIDENCE QUANTITIES UNKNOWN against_frontier choice_table choices "
        "compared_level computed_by_seed computed_curves computed_otherwise contrast "
        "contrasts mean_limit noise_limit noise_verdict paper_sizes remedied seed_noise sizes",
    },
)
