"""The sparse feed-forward layer: formats, references, the layer, its plan, and sparse training
steps.

formats     how few active neurons are stored
reference   the layer over active neurons in plain torch: what every kernel computes
layer       SparseFFN, which computes by reference, by kernels, or densely
plan        which path a layer takes: measured times and the activity it saw
training    sparse training steps that lose nothing
"""
