"""Measure the router, in a simulation or live. Each subcommand measures one thing and prints a report."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Final, Protocol, cast

from bench.demo import command as demo
from bench.live import command as load
from bench.report.exits import refuse
from bench.sim import command as simulate


class Command(Protocol):
    """A module of this package that is a subcommand; the first line of its docstring is its help text."""

    __doc__: str | None

    def configure(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, options: argparse.Namespace) -> None: ...


COMMANDS: Final[Mapping[str, Command]] = {"demo": demo, "load": load, "simulate": simulate}
LAB: Final[Mapping[str, str]] = {
    "chunk-size": "bench.lab.micro.chunk_size",
    "decision-cost": "bench.lab.micro.decision_cost",
    "experiment": "bench.lab.experiments",
    "neighbour": "bench.lab.neighbour.command",
    "picture": "bench.lab.picture.command",
    "prefix-memory": "bench.lab.micro.prefix_memory",
    "request-path": "bench.lab.micro.request_path",
    "window": "bench.lab.micro.window_live",
}
"""The lab's commands by module. Only a checkout has them, not the installed package."""
PROJECT: Final = ("bench", "router", "workers")


def main(arguments: Sequence[str]) -> None:
    if arguments and arguments[0] in LAB and not _in_checkout():
        refuse("bench", f"{arguments[0]} needs a checkout of the project: the installed package leaves the lab out")
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for name, command in _commands():
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
        refuse("bench", f"{error.name} is not installed; it comes with the development extras")


def _in_checkout() -> bool:
    return find_spec("bench.lab") is not None


def _commands() -> Iterator[tuple[str, Command]]:
    yield from COMMANDS.items()
    if _in_checkout():
        yield from ((name, cast(Command, import_module(module))) for name, module in LAB.items())


if __name__ == "__main__":
    main(sys.argv[1:])
