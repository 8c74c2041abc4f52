"""Tables behind the figures: runs, logs, traces, measured rows and evaluations as DataFrames.

Everything here is a count, a mean or a ratio of logged, stored or measured numbers. Nothing draws,
and only `Bench` reads files. Each module imports those above it alone:

    runs      outcomes of runs, an L1 sweep by level, curves over training, where activity is
    variants  other choices of training, sizes and ways to compute, and the noise of seeds
    longer    outcomes over training tokens, and the time that two trainings take to one loss
    activity  a trace or an aggregate by layer, token, position and neuron
    formats   the formats cell by cell, and their bytes
    speed     measured layers, training steps and whole models over dense
    quantized the fastest in FP8 beside bf16, and its quality
    clusters  what a training would cost on many GPUs
    tasks     accuracies of downstream tasks, and models beside each other on the same items
    relufied  pretrained models that became sparse, and the speed of their activity
"""

from twell.lazy import hand_on

__getattr__, __dir__, __all__ = hand_on(
    __name__,
    {
        ".activity": "around_word by_position by_surprise contexts firing kept_activity neuron_of "
        "passage per_layer per_token strongest surprise surprise_correlation tile_overflow "
        "together union_sizes",
        ".clusters": "Cluster stops_scaling training_costs",
        ".formats": "format_bytes format_cells",
        ".longer": "late_gain over_tokens race reached trend",
        ".quantized": "DENSE_FP8_BY fastest fp8_quality of_fp8_calls side_of speed_and_quality",
        ".relufied": "ORIGINAL STUDENTS WITHOUT_L1 gains_by_share relufied_answers "
        "relufied_budgets relufied_frontier relufied_outlook relufied_pairs relufied_runs",
        ".runs": "FINDINGS MAX_PRICE PEAK_WITHIN choice described findings fits groups levels "
        "price_at readable settles_after shared sweep traced_model training_curves",
        ".speed": "BASELINE Bench at_level beside_imposed by_case correlation crossovers "
        "decode_speedups layer_contributions layer_parts layers_at level_gains model_speedups "
        "near_level scale_table speedups step_speedups training_speedups",
        ".tasks": "MEAN TASKS accuracies against_dense answer_records backend_differences "
        "by_level paired_records paired_runs seven_tasks several_levels",
        "twell.tables": "evaluations last_validation level_name list_runs logged_layers hardware",
        "twell.trace.neurons": "specific",
        ".variants": "QUANTITIES against_frontier choice_table choices compared_level "
        "computed_by_seed computed_curves computed_otherwise contrast contrasts noise_limit "
        "paper_sizes remedied seed_noise sizes",
    },
)
