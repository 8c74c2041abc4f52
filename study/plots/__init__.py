"""One function a figure: tables of study.analysis in, a Figure out, which `Keep` saves.

    base      style, colours, captions and legends; `Keep`
    formats   the formats (Fig. 1)
    training  sweeps, choices, sizes, tokens and races (Figs 2, 3, 8, 9); pretrained models
    activity  layers, tokens and neurons (Figs 6, 7)
    speed     the speed of a layer, and FP8 against its quality
    models    tasks, speed, energy and memory of whole models (Figs 4 to 6, Table 1)

No file is read here. `base` has the one colour of each meaning.
"""

from study import first_of

__getattr__ = first_of(__name__, ".base .training .speed .models .activity .formats")
