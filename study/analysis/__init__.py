"""Tables behind the figures: runs, logs, traces, measured rows and evaluations as DataFrames.

Everything here is a count, a mean or a ratio of logged, stored or measured numbers. Nothing draws,
and only `Bench` reads files. Each module imports those above it alone:

    runs      outcomes of runs, an L1 sweep by level, curves over training, where activity is
    variants  other choices of training, sizes and ways to compute, and the noise of seeds
    races     the time that two trainings take to one loss
    activity  a trace or an aggregate by layer, token, position and neuron
    formats   the formats cell by cell, and their bytes
    speed     measured layers, training steps and whole models over dense
    quantized the fastest in FP8 beside bf16, and its quality
    tasks     accuracies of downstream tasks, and models beside each other on the same items
    relufied  pretrained models that became sparse, and the speed of their activity
"""

from study import first_of

__getattr__ = first_of(
    __name__,
    ".runs .speed .variants .activity .tasks .races .quantized .relufied "
    "twell.tables twell.trace.neurons .formats",  # the last imports torch, which takes seconds
)
