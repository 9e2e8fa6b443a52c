"""How a command that did not come to its end says so."""

import sys
from typing import Final, NoReturn

UNUSABLE: Final = 2
"""The exit status where nothing could be measured, as argparse has it."""
INTERRUPTED: Final = 130
"""As a shell tells it."""


def refuse(command: str, reason: str) -> NoReturn:
    """End with one line that says why."""
    print(f"{command}: error: {' '.join(reason.split())}", file=sys.stderr)
    sys.exit(UNUSABLE)
