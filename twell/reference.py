"""The public name of twell.sparse.reference."""

import sys

from twell.sparse import reference

sys.modules[__name__] = reference
