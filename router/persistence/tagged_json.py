"""Writes a member of a union of classes as JSON with its class name: `[class name, fields]`.

The name is needed because some classes have the same fields. Use in pydantic as `Annotated[One | Other, ByName()]`.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final, get_args

from pydantic import ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

JSON: Final = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="strings")
"""Settings for the core's data: JSON itself has no form for bytes and infinite numbers."""


class ByName:
    """Annotates a union whose members are written with their class names."""

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        tag = core_schema.str_schema()
        pairs: dict[Any, CoreSchema] = {
            kind.__name__: core_schema.tuple_schema([tag, handler.generate_schema(kind)]) for kind in get_args(union)
        }
        pair = core_schema.tagged_union_schema(pairs, discriminator=_tag_of)
        tagged = core_schema.wrap_serializer_function_ser_schema(_write_tagged, schema=pair)
        return core_schema.no_info_after_validator_function(itemgetter(1), pair, serialization=tagged)


def _tag_of(pair: Sequence[object]) -> object:
    return pair[0]


def _write_tagged(member: object, write: Callable[[object], object]) -> object:
    return write((type(member).__name__, member))
