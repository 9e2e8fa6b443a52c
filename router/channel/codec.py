"""How a member of a union of classes is written as JSON: as [the name of its class, itself].

By their fields, some are alike. For pydantic: `Annotated[One | Other, ByName()]`.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final, get_args

from pydantic import ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

JSON: Final = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="strings")
"""How the core's data is written: bytes and infinite numbers have no form of their own there."""


class ByName:
    """An annotation."""

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        name = core_schema.str_schema()
        pairs: dict[Any, CoreSchema] = {
            kind.__name__: core_schema.tuple_schema([name, handler.generate_schema(kind)]) for kind in get_args(union)
        }
        pair = core_schema.tagged_union_schema(pairs, discriminator=_name_in)
        named = core_schema.wrap_serializer_function_ser_schema(_write_named, schema=pair)
        return core_schema.no_info_after_validator_function(itemgetter(1), pair, serialization=named)


def _name_in(pair: Sequence[object]) -> object:
    return pair[0]


def _write_named(member: object, write: Callable[[object], object]) -> object:
    return write((type(member).__name__, member))
