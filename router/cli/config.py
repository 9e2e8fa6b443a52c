"""The command `d2lpm config`, which prints the settings as a commented file."""

import argparse
import os

from router.config.settings import Settings
from router.config.sources import ABOUT, add_flags, load
from router.config.template import commented


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `config`, which are those of `serve`."""
    parser.usage = "%(prog)s [FLAG ...]"
    parser.epilog = ABOUT
    add_flags(parser)
    parser.set_defaults(run=lambda flags: _config(load(flags, os.environ)))


def _config(settings: Settings) -> int:
    print(commented(settings), end="")
    return 0
