"""The sparse feed-forward layer.

formats       how active neurons are stored: ELL (rows), TwELL, Hybrid (hybrid), TileUnion
reference     the layer in plain torch, the formula of every kernel
layer         SparseFFN, which computes by reference, by kernels or densely
              (projections: whether it may read its weights)
ops           sparse_ffn, the entry to the kernels (training_ops: with sparse gradients)
observe       the L1 term and the activity that a layer's passes show
plan          the path that a layer takes, from measured times (calibration) and its activity
training      sparse training steps that retry what overflows
"""
