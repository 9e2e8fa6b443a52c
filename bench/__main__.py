"""Measure the router, in a simulation or live. Each subcommand measures one thing and prints a report."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Final, Protocol, cast

from bench.report.exits import refuse
from router.errors import ConfigError
from router.runtime.command_line import Parser


class Command(Protocol):
    """A module of this package that is a subcommand; the first line of its docstring is its help text."""

    __doc__: str | None

    def configure(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, options: argparse.Namespace) -> None: ...


COMMANDS: Final[Mapping[str, str]] = {
    "demo": "bench.demo.command",
    "load": "bench.live.command",
    "simulate": "bench.sim.command",
}
"""The commands by module."""
LAB: Final[Mapping[str, str]] = {
    "chunk-size": "bench.lab.micro.chunk_size",
    "crowd": "bench.lab.sweeps.crowd_live",
    "decision-cost": "bench.lab.micro.decision_cost",
    "engines": "bench.lab.engines.command",
    "experiment": "bench.lab.experiments",
    "neighbour": "bench.lab.neighbour.command",
    "picture": "bench.lab.picture.command",
    "prefix-memory": "bench.lab.micro.prefix_memory",
    "profile": "bench.lab.micro.profile",
    "ranks": "bench.lab.balance.live",
    "request-path": "bench.lab.micro.request_path",
    "router-cost": "bench.lab.neighbour.router_cost",
    "trace": "bench.lab.picture.trace",
    "window": "bench.lab.micro.window_live",
}
"""The lab's commands by module. Only a checkout has them, not the installed package."""
PROJECT: Final = ("bench", "router", "workers")


def main(arguments: Sequence[str], program: str = "python -m bench") -> None:
    """Run a command. `program`: the name of this program in help texts and errors of arguments."""
    if arguments and arguments[0] in LAB and not _in_checkout():
        refuse("bench", f"{arguments[0]} needs a checkout of the project: the installed package leaves the lab out")
    name = program.rpartition(" ")[2]
    try:
        options = _parser(arguments, program).parse_args(arguments)
        options.run(options)
    except ConfigError as error:
        refuse(name, str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in PROJECT:
            raise
        refuse(name, f"{error.name} is not installed; it comes with the extra `dev` (make dev)")


def _parser(arguments: Sequence[str], program: str) -> Parser:
    """Return the parser of all commands.

    If a command is called, only its module is imported: the others need seconds, and packages that serving does not.
    """
    known = {**COMMANDS, **(LAB if _in_checkout() else {})}
    called = [name for name in arguments[:1] if name in known]
    parser = Parser(prog=program, description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for name, module in known.items():
        if not called and arguments[:1] not in (["-h"], ["--help"]):
            subparsers.add_parser(name)  # for the error, which names the nearest command
        elif not called or name in called:
            command = cast(Command, import_module(module))
            summary = (command.__doc__ or "").partition("\n")[0]
            subparser = subparsers.add_parser(name, help=summary, description=command.__doc__)
            command.configure(subparser)
            subparser.set_defaults(run=command.run)
    return parser


def _in_checkout() -> bool:
    return find_spec("bench.lab") is not None


if __name__ == "__main__":
    main(sys.argv[1:])
