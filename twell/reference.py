"""The layer in plain torch: the public name of twell.sparse.reference and hybrid_reference."""

from twell.sparse.hybrid_reference import *  # noqa: F403
from twell.sparse.reference import *  # noqa: F403
