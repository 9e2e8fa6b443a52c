"""The YAML of the files that an operator writes: every scalar is its text, and a name stands once.

Nothing is written here, so the comments and places that ruamel.yaml keeps would be of no use.
"""

from collections.abc import Hashable
from typing import IO

import yaml


def read(source: str | IO[bytes]) -> object:
    """The document, of mappings, lists and texts; None if there is none. Raises yaml.YAMLError."""
    return yaml.load(source, _Loader)


class _Loader(yaml.BaseLoader):
    """Leaves every scalar a text, where others take `off` for a boolean and 0123 for 83; refuses a name that stands
    twice, of which YAML would take the last.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """See the base."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.YAMLError(f"{key.value} is there twice, again in line {key.start_mark.line + 1}")
                seen.add(key.value)
        return super().construct_mapping(node, deep)
