"""`python -m router` is the command `d2lpm`."""

import sys

from router.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
