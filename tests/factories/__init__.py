"""Inputs that tests share, one module a stage. Nothing here asserts."""

import os

# One number for all random inputs. `make fuzz` sets another one, and pytest's header prints it.
SEED = int(os.environ.get("TWELL_SEED", "20260323"))
