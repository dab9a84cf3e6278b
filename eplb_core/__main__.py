"""`python -m eplb_core`: the same as the command `eplb`."""

import sys

from eplb_core.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
