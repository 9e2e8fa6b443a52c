"""The command `d2lpm process`, by which `d2lpm serve --processes` starts its fronts and its scheduler."""

from router.process.front_process import run_front
from router.process.plan import SCHEDULER, read_plan, report_alive
from router.process.scheduler_process import import_all, run_scheduler
from router.runtime.command_line import Parser


def configure(parser: Parser) -> None:
    """Add the name of the process, for lists of processes; all that it needs comes on its standard input."""
    parser.add_argument("name")
    parser.set_defaults(run=lambda options: _run(options["name"]))


def _run(name: str) -> int:
    """Wait for the plan of this process, and run it until its end. Raises ConfigError for a file that cannot be used.

    The scheduler's standby waits here, for a plan that may never come.
    """
    if name == SCHEDULER:
        import_all()
        report_alive()
    plan = read_plan()
    if plan is None:
        return 0
    report_alive()
    return run_front(plan) if plan.number else run_scheduler(plan)
