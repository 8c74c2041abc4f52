"""The layer in plain torch: the public name of twell.sparse.reference."""

from twell.sparse.reference import *  # noqa: F403
