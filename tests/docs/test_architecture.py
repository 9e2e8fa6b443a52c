"""Who may import whom, and what the pure files may not touch.

The most specific row counts. A module may always import its own row's package; `*` is every module of the project.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("router", "workers", "bench")

ARROWS: Final[dict[str, tuple[str, ...]]] = {
    # The wire is the only contract between the two sides, so that one mistake cannot sit on both.
    "workers": (),
    "bench": ("router.core", "workers"),
    "bench.picture": ("bench", "router.core"),
    "bench.demo": ("bench", "router.core", "router.emulate", "router.errors"),
    "router.__main__": (
        *("router.app", "router.replay", "router.settings", "router.sources", "router.emulate", "router.errors"),
        "router.front",
        "router.check_commands",
        *("router.lifecycle", "router.collector", "router.open_files", "router.access_log"),
        "router.key_commands",
    ),
    "router.replay": ("router.app", "router.journal", "router.settings", "router.errors", "router.core"),
    "router.app": ("router",),
    "router.gateway": (
        *("router.journey", "router.exchange", "router.conductor", "router.fleet"),
        *("router.api", "router.identity", "router.limits", "router.errors", "router.core"),
        *("router.byte_budget", "router.parse_slots", "router.response_calls"),
    ),
    "router.response_calls": (
        *("router.response_keeper", "router.background_responses", "router.stored_responses"),
        *("router.exchange", "router.conductor", "router.fleet", "router.upstream", "router.verdict"),
        *("router.byte_budget", "router.limits", "router.api", "router.errors", "router.core"),
    ),
    "router.response_keeper": (
        *("router.background_responses", "router.stored_responses", "router.fleet", "router.limits"),
        *("router.api", "router.core"),
    ),
    "router.background_responses": (
        *("router.conductor", "router.fleet", "router.upstream", "router.limits"),
        *("router.api", "router.errors", "router.core"),
    ),
    "router.stored_responses": ("router.api", "router.core"),
    "router.byte_budget": ("router.errors", "router.core"),
    "router.unread": ("router.byte_budget",),
    "router.parse_slots": (),
    "router.journey": (
        *("router.byte_budget", "router.parse_slots"),
        *("router.exchange", "router.conductor", "router.fleet", "router.upstream", "router.accepted_fields"),
        *("router.verdict", "router.response_keeper", "router.api", "router.errors", "router.core"),
    ),
    "router.verdict": ("router.worker_json", "router.errors", "router.core"),
    "router.front": (
        *("router.alarm", "router.corked", "router.sending", "router.deadlines"),
        *("router.refusals", "router.connections", "router.unread", "router.errors"),
    ),
    "router.corked": (),
    "router.sending": ("router.unread",),
    "router.alarm": (),
    "router.deadlines": ("router.alarm", "router.connections"),
    "router.refusals": ("router.connections", "router.api", "router.errors"),
    "router.connections": ("router.byte_budget", "router.core"),
    "router.exchange": ("router.api", "router.byte_budget", "router.connections", "router.errors"),
    "router.lifecycle": ("router.exchange", "router.errors"),
    "router.lag": (),
    "router.open_files": (),
    "router.access_log": (),
    "router.background": (),
    "router.collector": ("router.background",),
    "router.worker_drain": ("router.core",),
    "router.by_name": (),
    "router.atomic_file": (),
    "router.limits": ("router.identity", "router.errors", "router.core"),
    "router.keys": ("router.plain_yaml", "router.identity", "router.errors", "router.core"),
    "router.key_edits": ("router.keys", "router.identity", "router.atomic_file", "router.errors"),
    "router.key_commands": ("router.key_edits", "router.keys"),
    "router.key_watch": (
        *("router.keys", "router.atomic_file", "router.background", "router.identity", "router.errors"),
    ),
    "router.admission_metrics": (),
    "router.response_metrics": (),
    "router.kept_files": (),
    "router.state": (
        "router.stored_responses",
        *("router.atomic_file", "router.background", "router.by_name", "router.errors", "router.core"),
    ),
    "router.conductor": ("router.errors", "router.core"),
    "router.accepted_fields": ("router.api",),
    "router.fleet": (
        *("router.upstream", "router.event_sources", "router.accepted_fields", "router.api"),
        *("router.errors", "router.core"),
    ),
    "router.upstream": ("router.alarm", "router.errors"),
    "router.monitor": ("router.polls", "router.fleet", "router.engines", "router.errors", "router.core"),
    "router.exact_map": (
        *("router.subscriber", "router.event_stream", "router.event_sources", "router.tokens"),
        *("router.local_tokenizer", "router.settings", "router.fleet", "router.conductor"),
        *("router.errors", "router.core"),
    ),
    "router.subscriber": (
        *("router.event_stream", "router.event_sources", "router.polls"),
        *("router.fleet", "router.errors", "router.core"),
    ),
    "router.polls": ("router.errors",),
    "router.event_metrics": ("router.core",),
    "router.event_stream": ("router.event_sources", "router.core"),
    "router.event_sources": ("router.worker_json", "router.errors"),
    "router.worker_json": ("router.errors",),
    "router.tokens": ("router.polls", "router.fleet", "router.errors", "router.core"),
    "router.local_tokenizer": ("router.errors",),
    "router.control": (
        *("router.admin", "router.report", "router.explain", "router.lifecycle", "router.fleet", "router.api"),
        *("router.errors", "router.core"),
    ),
    "router.admin": (
        *("router.roster", "router.history", "router.worker_drain", "router.fleet", "router.settings"),
        *("router.sources", "router.errors", "router.core"),
    ),
    "router.roster": (
        *("router.monitor", "router.worker_drain", "router.fleet", "router.event_sources", "router.settings"),
        *("router.errors", "router.core"),
    ),
    "router.discovery": (
        "router.atomic_file",
        "router.background",
        "router.settings",
        "router.sources",
        "router.errors",
    ),
    "router.history": ("router.report", "router.background", "router.core"),
    "router.check": (
        *("router.fit", "router.engines", "router.polls", "router.fleet", "router.accepted_fields", "router.api"),
        *("router.errors", "router.core"),
    ),
    "router.fit": ("router.engines", "router.accepted_fields", "router.errors"),
    "router.check_commands": (
        *("router.check", "router.fit", "router.commented", "router.discovery", "router.roster", "router.settings"),
        *("router.sources", "router.errors"),
    ),
    "router.commented": ("router.settings", "router.sources"),
    "router.explain": ("router.errors", "router.core"),
    "router.journal": ("router.by_name", "router.errors", "router.core"),
    "router.cache_alarm": ("router.errors", "router.core"),
    "router.report": ("router.turn_report", "router.fleet", "router.core"),
    "router.turn_report": ("router.core",),
    "router.emulate": ("router.errors",),
    "router.sources": ("router.settings", "router.plain_yaml", "router.errors"),
    "router.settings": ("router.core.policies", "router.identity"),
    "router.api": ("router.sse", "router.worker_json", "router.errors", "router.core"),
    "router.metrics": ("router.exposition", "router.core"),
    "router.state_metrics": ("router.metrics", "router.report", "router.exposition", "router.core"),
    "router.exposition": (),
    "router.plain_yaml": (),
    "router.engines": ("router.worker_json", "router.errors", "router.core"),
    "router.identity": ("router.errors", "router.core"),
    "router.sse": ("router.errors",),
    "router.errors": (),
    "router.core": (),
}
"""Module or package, and what it may import of the project beside itself."""

NO_CONCRETE_POLICY: Final = ("router.core.scheduler", "router.core.dispatched", "router.core.policy")

PURE: Final = (
    *("router.core", "router.api", "router.sse", "router.engines", "router.event_sources", "router.identity"),
    *("router.limits", "router.fit", "router.worker_json", "router.accepted_fields", "router.verdict"),
)
IMPURE: Final = (
    *("aiohttp", "fastapi", "httpx", "starlette", "uvicorn", "uvloop", "yaml", "zmq"),
    *("asyncio", "http.client", "http.server", "select", "selectors", "socket", "ssl", "urllib.request"),
    *("logging", "os", "pathlib", "secrets", "signal", "subprocess", "tempfile", "threading", "time"),
)
"""What has I/O, a clock or a log in it. Of `random`, pure files may use only `Random`, which they are given."""


def covers(package: str, module: str) -> bool:
    """Whether the module is the package or lies in it."""
    return module == package or module.startswith(f"{package}.")


def imported(source: str) -> Iterator[str]:
    """What a source imports, dotted; `from a import b` is a.b, be b a module or a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def allowed(module: str, target: str) -> bool:
    """Whether the arrows let one module of the project import another."""
    rows = [row for row in ARROWS if covers(row, module)]
    if not rows:
        return False
    row = max(rows, key=len)
    if module in NO_CONCRETE_POLICY and covers("router.core.policies", target):
        return False
    return any(covers(package, target) for package in (row, *ARROWS[row]))


def violations(module: str, source: str) -> list[str]:
    """The forbidden imports of a module, as `module -> target`."""
    found = []
    pure = any(covers(package, module) for package in PURE)
    for target in imported(source):
        top = target.split(".")[0]
        if not top:
            wrong = True  # relative: its name depends on where it stands
        elif top in PACKAGES:
            wrong = not allowed(module, target)
        elif covers("router.core", module):
            wrong = top not in sys.stdlib_module_names or impure(target)
        else:
            wrong = pure and impure(target)
        if wrong:
            found.append(f"{module} -> {target}")
    return found


def impure(target: str) -> bool:
    """Whether this import brings I/O, a clock, a log or the global random generator."""
    if covers("random", target):
        return target != "random.Random"
    return any(covers(name, target) for name in IMPURE)


def modules() -> dict[str, Path]:
    """Every module of the project, by its dotted name."""
    files = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): ROOT / path for path in files}


def test_the_project_follows_the_arrows() -> None:
    """No module imports what its row does not list, and no pure one anything that has I/O, a clock or a log."""
    found = [wrong for name, path in modules().items() for wrong in violations(name, path.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_every_module_has_a_row() -> None:
    """A new module is placed in the picture before it is used."""
    placeless = [name for name in modules() if name != "router" and not any(covers(row, name) for row in ARROWS)]
    assert not placeless


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("router.core.scheduler", "from router.core.policies import POLICIES"),
        ("router.core.scheduler", "from router.core import policies"),
        ("router.core.scheduler", "def f():\n    from .policies.d2lpm import D2lpm"),
        ("router.core.model", "import router.fleet"),
        ("router.core.model", "from router import fleet"),
        ("router.app", "from .gateway import Gateway"),
        ("router.core.model", "import time"),
        ("router.core.model", "from random import choice"),
        ("router.core.model", "import orjson"),
        ("router.api.chat", "from asyncio import sleep"),
        ("router.api.chat", "from router.gateway import Gateway"),
        ("router.gateway", "from router.settings import Settings"),
        ("router.fleet", "from router.gateway import Gateway"),
        ("router.app", "from workers.engine import Engine"),
        ("router.app", "import bench"),
        ("workers.app", "from router.sse import Splitter"),
        ("router.unheard_of", "import router.core.model"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    """The check fails on each kind of violation, wherever in a file it stands."""
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("router.core.scheduler", "from random import Random"),
        ("router.core.policies.dlpm", "from router.core.model import Request\nimport hashlib"),
        ("router.core.policies", "from router.core.policies.d2lpm import D2lpm"),
        ("router.gateway", "import asyncio\nfrom router.api import family_of"),
        ("router.app", "from router.gateway import Gateway\nimport fastapi"),
        ("bench.simulate", "from router.core.scheduler import Scheduler\nfrom workers.engine import Engine"),
    ],
)
def test_an_arrow_is_let_through(module: str, source: str) -> None:
    """The check is not so strict that it forbids what the table allows."""
    assert not violations(module, source)
