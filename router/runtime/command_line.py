"""Command lines whose mistakes are one line that names the nearest known word."""

import argparse
from collections.abc import Iterable
from typing import Any, Final, NoReturn

from router.errors import ConfigError
from router.runtime.mistakes import did_you_mean

INTERRUPTED: Final = 130
"""The exit code that shells use for a command ended by SIGINT."""


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError where its base class prints the usage and exits.

    For an unknown flag, subcommand or choice, the error names the nearest one that there is.
    """

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(message)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the arguments of this parser or of a subcommand. Raises ConfigError for an unknown one.

        Here and not in `parse_args`, because only the subcommand's own parser knows its flags.
        """
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = next((word for word in unknown if word.startswith("-")), unknown[0])
            meant = did_you_mean(flag.partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            message = f"there is no {value!r}{did_you_mean(str(value), known)} (choose from {', '.join(known)})"
            raise argparse.ArgumentError(action, message)
