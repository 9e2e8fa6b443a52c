"""Reads the YAML files that an operator writes: every scalar stays text, and duplicate names are refused.

This module writes nothing, so the comments and positions that ruamel.yaml preserves would be of no use.
"""

from collections.abc import Hashable, Sequence
from typing import IO

import yaml

from router.errors import ConfigError


def read(source: str | IO[bytes]) -> object:
    """Return the document, made of mappings, lists and strings; None if it is empty.

    Raises ConfigError, in one line that names the line of the mistake.
    """
    try:
        return yaml.load(source, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark is not None else ""
        raise ConfigError(f"{line}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(" ".join(str(error).split())) from None


def line_of(source: str, place: Sequence[object]) -> int:
    """Return the line, from 1, of the value at a place in a document: the names and indexes that lead to it. Where that
    does not exist, it is the line of the innermost mapping or list around it.
    """
    node, line = yaml.compose(source, yaml.BaseLoader), 1
    for step in place:
        found = _inside(node, step)
        if found is None:
            break
        start, node = found
        line = start.start_mark.line + 1
    return line


def _inside(node: yaml.Node | None, step: object) -> tuple[yaml.Node, yaml.Node] | None:
    """Return where the entry of this name or index begins, and its value."""
    match node:
        case yaml.MappingNode(value=pairs):
            return next((pair for pair in pairs if pair[0].value == step), None)
        case yaml.SequenceNode(value=items) if isinstance(step, int) and step < len(items):
            return items[step], items[step]
        case _:
            return None


class _Loader(yaml.BaseLoader):
    """Keeps every scalar as text, where other loaders read `off` as a boolean and 0123 as 83, and refuses duplicate
    names, of which PyYAML would keep the last.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise ConfigError(f"line {key.start_mark.line + 1}: duplicate name {key.value}")
                seen.add(key.value)
        return super().construct_mapping(node, deep)
