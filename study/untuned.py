"""A provider of `twell measure`: the layer by "auto", which counts its own first calls."""

from twell.measure.layer import set_projections
from twell.sparse.layer import SparseFFN


def layer(w_gate, w_up, w_down):
    """Return the layer as a user has it without `twell.tune`."""
    ffn = SparseFFN(*w_up.shape[::-1], gated=w_gate is not None, backend="auto", device="meta")
    set_projections(ffn, (w_gate, w_up, w_down), bias=False)
    return ffn.eval()
