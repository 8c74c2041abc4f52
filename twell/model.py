"""The public name of twell.models."""

import sys

from twell import models

sys.modules[__name__] = models
