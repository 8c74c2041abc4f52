"""The public name of twell.sparse.formats."""

import sys

from twell.sparse import formats

sys.modules[__name__] = formats
