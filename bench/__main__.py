"""The command `python -m bench`: each subcommand measures one thing and prints a table."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from bench.demo import command as demo
from bench.lab import experiments
from bench.lab.micro import chunk_size, decision_cost, prefix_memory, window_live
from bench.lab.neighbour import command as neighbour
from bench.lab.picture import command as picture
from bench.live import command as load
from bench.sim import command as simulate


class Command(Protocol):
    """A module of this package that is a subcommand; the first line of its docstring is the help text."""

    __doc__: str | None

    def configure(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, options: argparse.Namespace) -> None: ...


COMMANDS: Final[Mapping[str, Command]] = {
    "chunk-size": chunk_size,
    "decision-cost": decision_cost,
    "demo": demo,
    "experiment": experiments,
    "load": load,
    "neighbour": neighbour,
    "picture": picture,
    "prefix-memory": prefix_memory,
    "simulate": simulate,
    "window": window_live,
}
PROJECT: Final = ("bench", "router", "workers")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for name, command in COMMANDS.items():
        summary = (command.__doc__ or "").partition("\n")[0]
        subparser = subparsers.add_parser(name, help=summary, description=command.__doc__)
        command.configure(subparser)
        subparser.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in PROJECT:
            raise
        print(f"bench: error: {error.name} is not installed; it comes with the development extras", file=sys.stderr)
        sys.exit(2)  # as argparse does


if __name__ == "__main__":
    main(sys.argv[1:])
