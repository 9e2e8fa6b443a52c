"""Reads the YAML files that an operator writes: every scalar stays text, and duplicate names are refused.

This module writes nothing, so the comments and positions that ruamel.yaml preserves would be of no use.
"""

from collections.abc import Hashable
from typing import IO

import yaml


def read(source: str | IO[bytes]) -> object:
    """Return the document, made of mappings, lists and strings; None if it is empty. Raises yaml.YAMLError."""
    return yaml.load(source, _Loader)


class _Loader(yaml.BaseLoader):
    """Keeps every scalar as text, where other loaders read `off` as a boolean and 0123 as 83, and refuses duplicate
    names, of which PyYAML would keep the last.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.YAMLError(f"duplicate name {key.value} in line {key.start_mark.line + 1}")
                seen.add(key.value)
        return super().construct_mapping(node, deep)
