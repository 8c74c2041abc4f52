"""The public name of twell.sparse.layer."""

import sys

from twell.sparse import layer

sys.modules[__name__] = layer
