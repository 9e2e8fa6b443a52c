"""Exit codes and messages of commands that could not finish."""

import sys
from typing import Final, NoReturn

UNUSABLE: Final = 2
"""Exit status if nothing could be measured; argparse uses the same."""
INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as shells report it."""


def refuse(command: str, reason: str) -> NoReturn:
    """Exit with a one-line error message."""
    print(f"{command}: error: {' '.join(reason.split())}", file=sys.stderr)
    sys.exit(UNUSABLE)
