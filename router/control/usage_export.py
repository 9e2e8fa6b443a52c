"""The export of usage for those who bill it: JSON or CSV, written in batches between which other calls are served."""

import asyncio
import csv
import io
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import date
from decimal import Decimal
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import TypeAdapter
from starlette.responses import StreamingResponse

from router.auth.prices import PricedUsage
from router.errors import BadRequest

_ROWS: Final = TypeAdapter(Sequence[PricedUsage])
FIELDS: Final = [field.name for field in fields(PricedUsage)]
FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""What a cell begins with that a spreadsheet computes."""


@dataclass(frozen=True, slots=True)
class UsageExport:
    """Usage of all clients."""

    currency: str | None
    """The currency of amounts; None without prices."""
    batches: Iterator[Sequence[PricedUsage]]
    """The rows, by day, client and model."""


ExportLookup = Callable[[date, date], UsageExport]
"""Returns the usage from the first to the last day, both included."""


def add_export(routes: APIRouter, usage: ExportLookup) -> None:
    """Add the path of the export."""
    described: dict[int | str, dict[str, Any]] = {
        200: {"content": {"application/json": {}, "text/csv": {}}, "description": "Rows by day, client and model."},
        BadRequest.status: {"description": "The format or a day is not valid."},
    }
    parameters = [
        {"name": name, "in": "query", "required": False, "description": about, "schema": schema}
        for name, about, schema in (
            ("format", "Format of the answer.", {"type": "string", "enum": ["json", "csv"], "default": "json"}),
            ("from", "The first day (UTC).", {"type": "string", "format": "date"}),
            ("to", "The last day (UTC).", {"type": "string", "format": "date"}),
        )
    ]

    @routes.get(
        "/usage",
        response_class=StreamingResponse,
        responses=described,
        openapi_extra={"parameters": parameters},
    )
    async def export(request: Request) -> StreamingResponse:
        """What each client used of each model on each day, in tokens, and what that costs at the prices in the clients
        file. A call counts on the day (UTC) on which it ended.
        """
        first, last = _day(request, "from", date.min), _day(request, "to", date.max)
        if first > last:
            raise BadRequest("`from` must not be later than `to`.", param="from", code="invalid_value")
        match request.query_params.get("format", "json"):
            case "json":
                return StreamingResponse(as_json(usage(first, last)), media_type="application/json")
            case "csv":
                headers = {"content-disposition": 'attachment; filename="usage.csv"'}
                return StreamingResponse(as_csv(usage(first, last)), media_type="text/csv", headers=headers)
            case _:
                raise BadRequest("`format` must be json or csv.", param="format", code="invalid_value")


async def as_json(export: UsageExport) -> AsyncIterator[bytes]:
    """Yield an export as a JSON object with the members `currency` and `usage`."""
    currency = b"null" if export.currency is None else b'"%b"' % export.currency.encode()
    yield b'{"currency":%b,"usage":[' % currency
    comma = b""
    for batch in export.batches:
        yield comma + _ROWS.dump_json(batch)[1:-1]
        comma = b","
        await asyncio.sleep(0)
    yield b"]}"


async def as_csv(export: UsageExport) -> AsyncIterator[bytes]:
    """Yield an export as CSV (RFC 4180), its first line the names of the columns."""
    yield _lines([[*FIELDS, "currency"]])
    for batch in export.batches:
        yield _lines([[*[_cell(getattr(row, name)) for name in FIELDS], export.currency] for row in batch])
        await asyncio.sleep(0)


def _lines(rows: Sequence[Sequence[object]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def _cell(value: object) -> object:
    """Return what to write. A text that a spreadsheet would take for a formula begins with an apostrophe."""
    match value:
        case Decimal():
            return f"{value:f}"
        case str() if value.startswith(FORMULA):
            return f"'{value}"
        case _:
            return value


def _day(request: Request, name: str, default: date) -> date:
    given = request.query_params.get(name)
    try:
        return default if given is None else date.fromisoformat(given)
    except ValueError:
        raise BadRequest(f"`{name}` must be a day such as 2027-01-31.", param=name, code="invalid_value") from None
