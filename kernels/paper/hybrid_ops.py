"""The operator twell::train_hybrid, a training step by the paper's hybrid format: see hybrid.py.

`train("hybrid", ...)` of twell.kernels.training_ops imports this module at its first use.
"""

from twell.kernels import hybrid
from twell.kernels.training_ops import register

train_hybrid = register("hybrid", hybrid, hybrid.Saved)
