"""The import rules of docs/architecture.md: folders in order, a narrow door into the core, and pure folders."""

import ast
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("router", "workers", "bench")
MOST_FILES: Final = 12
"""In one folder, `__init__.py` aside."""

ORDER: Final[Mapping[str, str]] = {
    "router": "__main__ > cli > process > control > cluster > kv_events, persistence, telemetry > front"
    " > upstream > config > auth > channel, api > core, runtime > errors",
    "router.core": "snapshot > scheduler > carried_requests > attempts, next_attempts > handoffs, retries, membership,"
    " books, known_clients > requests > scheduler_settings, policies > cache, fleet"
    " > clients, kv_blocks, predict > model",
    "router.core.policies": "registry > balance > dlpm, preble > deficit, sessions, simple, vtc, queued > base"
    " > context",
    "router.api": "openapi > families > continuation > endpoints > handoff > answer > body",
    "router.front": "gateway > relay > whole_answer > session_labels, stored, answer_stream, handoff > outgoing"
    " > exchange, parsing, verdict > call_record, http > byte_budget, drain",
    "workers": "__main__ > server > dialects > settings, api > engine",
    "bench": "__main__ > lab > demo > live, sim > report > workloads",
    "bench.lab": "experiments > agents, balance, engines, neighbour, papers, sweeps > micro, picture > frame > drawing",
}
"""In each package: a folder or file may import those to its right; those between commas do not import each other."""

DOORS: Final[Mapping[str, tuple[str, ...]]] = {
    "workers": ("workers",),  # the wire is the only contract with the router, so that one mistake cannot sit on both
    "bench": ("bench", "workers", "router.core", "router.runtime", "router.errors"),
    "router": ("router",),
}
"""Which packages a package may import at all."""

INTO_THE_CORE: Final[Mapping[str, tuple[str, ...]]] = {
    "router.api": ("model",),
    "router.auth": ("model", "clients.rate_limits"),
    "router.front": ("model", "clients.fair_drop"),
    "router.channel": ("model", "scheduler", "clients.rate_limits"),
    "router.upstream": ("model",),
    "router.kv_events": ("model", "kv_blocks"),
    "router.persistence": ("model", "clients.rate_limits", "fleet.stored_responses"),
    "router.control": ("model",),
    "router.cluster": ("model",),
    "router.config": ("policies.registry",),
}
"""What each of these folders may import of `router.core`; the folders that are not listed may import all of it."""

PURE: Final = ("router.core", "router.api", "router.front.verdict", "router.upstream.dialects")
IMPURE: Final = (
    *("aiohttp", "fastapi", "httpx", "starlette", "uvicorn", "uvloop", "yaml", "zmq"),
    *("asyncio", "http.client", "http.server", "select", "selectors", "socket", "ssl", "urllib.request"),
    *("logging", "os", "pathlib", "secrets", "signal", "subprocess", "tempfile", "threading", "time"),
)
"""I/O, clocks and logs. Of `random`, pure files may import only `Random`."""


def covers(package: str, module: str) -> bool:
    """Return whether the module is the package or lies in it."""
    return module == package or module.startswith(f"{package}.")


def imported(source: str) -> Iterator[str]:
    """Return the dotted names that a source imports; `from a import b` counts as a.b, whether b is a module or a
    name.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def ranks(package: str) -> Mapping[str, int]:
    """Return each folder or file of a package with its place in the order, from the right."""
    places = [place.split(", ") for place in ORDER[package].split(" > ")]
    return {name: rank for rank, names in enumerate(reversed(places)) for name in names}


def in_order(module: str, target: str) -> bool:
    """Return whether every order that holds for both modules lets the first import the second."""
    for package in ORDER:
        if module.startswith(f"{package}.") and target.startswith(f"{package}."):
            ours, theirs = (name.removeprefix(f"{package}.").split(".")[0] for name in (module, target))
            rank = ranks(package)
            if ours != theirs and not (ours in rank and theirs in rank and rank[ours] > rank[theirs]):
                return False
    return True


def through_the_door(module: str, target: str) -> bool:
    """Return whether the module's package may import the other's, and its folder that part of the core."""
    if not any(covers(package, target) for package in DOORS[module.split(".", maxsplit=1)[0]]):
        return False
    parts = next((parts for folder, parts in INTO_THE_CORE.items() if covers(folder, module)), None)
    if parts is None or not covers("router.core", target):
        return True
    return any(covers(f"router.core.{part}", target) for part in parts)


def impure(target: str) -> bool:
    """Return whether this import brings I/O, a clock, a log or the global random generator."""
    if covers("random", target):
        return target != "random.Random"
    return any(covers(name, target) for name in IMPURE)


def violations(module: str, source: str) -> list[str]:
    """Return the forbidden imports of a module, as `module -> target`."""
    found = []
    pure = any(covers(package, module) for package in PURE)
    for target in imported(source):
        top = target.split(".")[0]
        if not top:
            wrong = True  # relative: its name depends on where it stands
        elif top in PACKAGES:
            wrong = not (in_order(module, target) and through_the_door(module, target))
        elif covers("router.core", module):
            wrong = top not in sys.stdlib_module_names or impure(target)
        else:
            wrong = pure and impure(target)
        if wrong:
            found.append(f"{module} -> {target}")
    return found


def modules() -> dict[str, Path]:
    """Return every module of the project by its dotted name."""
    files = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): ROOT / path for path in files}


def test_the_project_follows_the_rules() -> None:
    """No module imports what its folder may not, and no pure one imports I/O, a clock or a log."""
    found = [wrong for name, path in modules().items() for wrong in violations(name, path.read_text("utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", ORDER)
def test_every_folder_has_a_place_in_the_order(package: str) -> None:
    """Each folder and file has a place in the order, and the order names nothing that does not exist."""
    folder = ROOT / package.replace(".", "/")
    there = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert set(ranks(package)) == there - {"__init__"}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_holds_more_than_a_dozen_files(package: str) -> None:
    """Every folder is small enough to be read from its listing."""
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}
    crowded = {folder: len([path for path in folder.glob("*.py") if path.stem != "__init__"]) for folder in folders}
    assert not {str(folder): count for folder, count in crowded.items() if count > MOST_FILES}


def steps(package: str) -> Iterator[tuple[str, str]]:
    """Return each folder of a package with one that it may not import: the folder on its left, and its neighbours."""
    places = [place.split(", ") for place in ORDER[package].split(" > ")]
    for left, right in pairwise(places):
        yield right[0], left[0]
    for place in places:
        yield from pairwise(place)


@pytest.mark.parametrize(("package", "ours", "theirs"), [(name, *step) for name in ORDER for step in steps(name)])
def test_an_order_refuses_an_import_to_the_left(package: str, ours: str, theirs: str) -> None:
    """Each step of each order refuses the import that goes against it."""
    assert violations(f"{package}.{ours}.one", f"from {package}.{theirs}.other import Name")


@pytest.mark.parametrize("folder", INTO_THE_CORE)
def test_a_door_refuses_the_rest_of_the_core(folder: str) -> None:
    """These folders may import of the core only what is listed."""
    assert violations(f"{folder}.one", "from router.core.cache.prefix_tree import PrefixTree")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("router.core.scheduler", "from router.core.policies.registry import POLICIES\nfrom .policies import dlpm"),
        ("router.core.scheduler", "def f():\n    from .policies.d2lpm import D2lpm"),
        ("router.process.single", "from .gateway import Gateway"),
        ("router.core.model.request", "import time"),
        ("router.core.model.request", "from random import choice"),
        ("router.core.model.request", "import orjson"),
        ("router.api.endpoints.chat", "from asyncio import sleep"),
        ("router.process.single", "from workers.engine.engine import Engine"),
        ("router.process.single", "import bench"),
        ("workers.server.app", "from router.api.answer.sse import Splitter"),
        ("bench.sim.simulation", "from router.front.gateway import Gateway"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    """The check fails on each kind of violation, wherever in a file it stands."""
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("router.core.scheduler", "from random import Random"),
        ("router.core.policies.dlpm.dlpm", "from router.core.model.request import Request\nimport hashlib"),
        ("router.front.gateway", "import asyncio\nfrom router.api.families import family_of"),
        ("router.process.single", "from router.front.gateway import Gateway\nimport fastapi"),
        ("bench.sim.command", "from router.core.scheduler import Scheduler\nfrom workers.engine.engine import Engine"),
    ],
)
def test_a_rightful_import_is_let_through(module: str, source: str) -> None:
    """The check accepts what the rules allow."""
    assert not violations(module, source)
