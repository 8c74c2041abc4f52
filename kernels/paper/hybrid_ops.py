"""The operator twell::train_hybrid, a training step by the paper's hybrid format: see hybrid.py.

`train("hybrid", ...)` of twell.kernels.training_ops imports this module at its first use.
"""

from twell.kernels.paper import hybrid
from twell.kernels.paper.hybrid_pack import HybridSaved
from twell.kernels.training_ops import register

train_hybrid = register("hybrid", hybrid, HybridSaved)
