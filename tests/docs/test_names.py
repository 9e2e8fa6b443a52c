"""Names and docstrings: one name for one thing, and no docstring that only points elsewhere."""

import ast
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Final

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "router").rglob("*.py"))
ALL_FILES = [path for package in ("router", "workers", "bench", "tests") for path in (ROOT / package).rglob("*.py")]
POINTER = re.compile(r"(?:As )?[Ss]ee (?:the )?(?:\w+ )?[\w`.:]+(?: and [\w`.:]+)?\.?")

NOTIFICATION = re.compile(r"on_\w+|\w+_(began|changed|charged|dispatched|ended|joined|left|started|through)")
"""Method names that state a fact: every class that is notified of it has a method of this name."""

VOCABULARY: Final[Mapping[str, str]] = {
    "resume": "Take over an attempt that an earlier run of the scheduler has sent to its worker.",
    "at": "Return what the object has or costs at one key or price.",
    "set": "Replace what is known of one key.",
    "rate": "Return a service rate, in cost units per second; None if it is not known.",
    "add": "Hold or count one more thing.",
    "remove": "Hold or count it no longer. It was added.",
    "discard": "Remove it if it is there.",
    "drop": "Delete all that is kept for one key, in whatever state it is.",
    "forget": "Delete what is kept for a client or response that is gone, unless it owes something.",
    "forget_worker": "Delete what is kept for a worker that is gone.",
    "to_forget": "Remove and return the oldest entries beyond the limit; other objects must forget them too.",
    "remember": "Keep the identity of something, as the most recent of its kind.",
    "enter": "Let a request wait here.",
    "join": "Take a member in, or note that a known one is back.",
    "leave": "Let a member go.",
    "add_request": "Count one more request of a client, or of all.",
    "remove_request": "Count one request of a client less.",
    "add_service": "Count service that a client, or the fleet, received.",
    "serve": "Count service of one request.",
    "charge": "Add a cost to a count that limits or measures a client; a negative cost is a refund.",
    "refill": "Add quanta until someone who waits is eligible.",
    "take": "Use up a part of what is limited.",
    "end": "Close the record of one attempt.",
    "apply": "Change the state as an event demands.",
    "record": "Note one observation.",
    "learn": "Update an estimate with one observation.",
    "advance": "Let time pass.",
    "expired": "Return the requests that have waited for too long.",
    "reset": "Return to the initial state.",
    "set_capacity": "Set how many tokens a worker's KV cache holds.",
    "saved": "Yield the rows of the state file.",
    "saved_groups": "Yield the rows of the state file about groups.",
    "restore": "Load rows that `saved` yielded.",
    "restore_group": "Load a row that `saved_groups` yielded.",
    "check_integrity": "Raise AssertionError if the object contradicts itself.",
    "match": "Return how much of a prompt each worker holds.",
    "input_tokens": "Return the size of a request's input in tokens.",
    "admits": "Return whether a worker has room for a request, or for so many uncached input tokens.",
    "room": "Return the most uncached input tokens with which a request may go to a worker.",
    "in_flight": "Return how many requests are in flight.",
    "deficit": "Return a client's deficit.",
    "of": "Return the part that belongs to the argument.",
    "plus": "Return the sum, field by field.",
}
"""What each method does whose name several unrelated classes of the core have."""


@cache
def modules() -> Sequence[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text("utf-8"))) for path in FILES]


def twice(places: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_class_name_stands_for_two_classes() -> None:
    """No two public classes have the same name; private classes belong to their file."""
    places = defaultdict[str, list[str]](list)
    for path, module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert not twice(places)


def test_no_file_of_the_core_has_the_name_of_another() -> None:
    """No file of the core has the name of another file of the router."""
    places = defaultdict[str, list[str]](list)
    for path in FILES:
        places[path.stem].append(str(path.relative_to(ROOT)))
    core = {name: found for name, found in twice(places).items() if any("core/" in each for each in found)}
    assert set(core) <= {"__init__"}


def pointers(source: str) -> list[int]:
    """Return the lines of the docstrings, of attributes too, that only point elsewhere."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if POINTER.fullmatch(" ".join(node.value.value.split()))
    ]


def test_no_docstring_only_points_elsewhere() -> None:
    """No docstring consists of `See X.` alone, which says nothing that an overriding method does not say
    by its name.
    """
    found = [f"{path.relative_to(ROOT)}:{line}" for path in ALL_FILES for line in pointers(path.read_text("utf-8"))]
    assert not found


def test_a_docstring_that_only_points_elsewhere_is_found() -> None:
    """That of a function, or of an attribute; not one that says something of its own."""
    pointer, statement = '"""See `g`."""', '"""Do it; see `g`."""'
    assert pointers(f"limit = 1\n{pointer}\ndef f():\n    {pointer}\ndef h():\n    {statement}\n") == [2, 4]


class CoreClasses:
    """The classes of the core, and which of them are related."""

    def __init__(self) -> None:
        self.nodes = {
            node.name: node
            for path, module in modules()
            if path.is_relative_to(ROOT / "router" / "core")
            for node in ast.walk(module)
            if isinstance(node, ast.ClassDef)
        }
        self._protocols = [name for name in self.nodes if "Protocol" in self._names_of_bases(name)]
        self._parents = {name: name for name in self.nodes}
        for name in self.nodes:
            for base in (*self.bases(name), *self._kept_protocols(name)):
                self._parents[self.family(name)] = self.family(base)

    def _names_of_bases(self, name: str) -> list[str]:
        return [re.split(r"[\[.]", ast.unparse(base))[0] for base in self.nodes[name].bases]

    def bases(self, name: str) -> list[str]:
        return [base for base in self._names_of_bases(name) if base in self.nodes]

    def methods(self, name: str) -> set[str]:
        """Return the public functions in the body of a class, properties included."""
        body = self.nodes[name].body
        return {each.name for each in body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")}

    def properties(self, name: str) -> set[str]:
        body = self.nodes[name].body
        return {
            each.name
            for each in body
            if isinstance(each, ast.FunctionDef) and "property" in map(ast.unparse, each.decorator_list)
        }

    def members(self, name: str) -> set[str]:
        """Return the methods and attributes of a class, inherited ones included."""
        assigned = {
            each.attr if isinstance(each, ast.Attribute) else each.id
            for each in ast.walk(self.nodes[name])
            if isinstance(each, ast.Attribute | ast.Name) and isinstance(each.ctx, ast.Store)
        }
        return (self.methods(name) | assigned).union(*map(self.members, self.bases(name)))

    def _kept_protocols(self, name: str) -> list[str]:
        """Return the protocols that a class implements by having all of their methods."""
        members = self.members(name)
        return [each for each in self._protocols if self.methods(each) and self.methods(each) <= members]

    def family(self, name: str) -> str:
        """Return one name for all classes that are related to this one by bases and protocols."""
        while self._parents[name] != name:
            name = self._parents[name]
        return name

    def passes_on(self, name: str, method: str) -> bool:
        """Return whether the method calls, or is, the method of the same name of another object."""
        functions = [each for each in self.nodes[name].body if isinstance(each, ast.FunctionDef)]
        return any(
            isinstance(each, ast.Attribute) and each.attr == method and isinstance(each.ctx, ast.Load)
            for function in functions
            if function.name in {method, "__init__"}
            for each in ast.walk(function)
        )


@cache
def shared_methods() -> dict[str, list[str]]:
    """Return the names of the core's public methods that unrelated classes have, each with these classes.

    Not among them are notifications, methods that pass the call on to a method of the same name, and names that stand
    for properties alone: a property is a noun of its object.
    """
    classes = CoreClasses()
    families = defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
    passed_on, methods = set[tuple[str, str]](), set[str]()
    for name in classes.nodes:
        for method in classes.methods(name):
            families[method][classes.family(name)].append(name)
        methods |= classes.methods(name) - classes.properties(name)
        passed_on |= {
            (method, classes.family(name)) for method in classes.members(name) if classes.passes_on(name, method)
        }
    own = {
        method: [names for family, names in found.items() if (method, family) not in passed_on]
        for method, found in families.items()
        if method in methods and not NOTIFICATION.fullmatch(method)
    }
    return {method: sorted(chain.from_iterable(found)) for method, found in own.items() if len(found) > 1}


def test_a_method_name_of_the_core_has_one_meaning() -> None:
    """Unrelated classes of the core share a method name only if the vocabulary says what it means in all of them."""
    unexplained = {name: found for name, found in shared_methods().items() if name not in VOCABULARY}
    assert not unexplained, "rename one of these methods, or add their common meaning to VOCABULARY"


def test_the_vocabulary_has_no_word_too_many() -> None:
    """A name is in the vocabulary only while unrelated classes share it."""
    assert not set(VOCABULARY) - set(shared_methods())
