"""`python -m twell`: see twell/cli/."""

import sys

from twell.cli import main

if __name__ == "__main__":
    sys.exit(main())
