"""Builds OpenTelemetry if the settings want it. Without that, none of its modules is imported."""

from typing import TYPE_CHECKING, Final

from router.config.settings import Settings
from router.errors import ConfigError
from router.upstream.connections import WorkerConnections

if TYPE_CHECKING:
    from router.telemetry.otel.export import OpenTelemetry

EXTRA: Final = ("google", "opentelemetry", "requests")
"""The modules that the extra installs."""


def build_open_telemetry(settings: Settings, connections: WorkerConnections) -> "OpenTelemetry | None":
    """Build what traces the calls of a front; None if the settings do not want it. Raises ConfigError.

    `connections`: to the workers, whose engines and addresses spans name.
    """
    if not settings.otel:
        return None
    try:
        from router.telemetry.otel.export import OpenTelemetry  # noqa: PLC0415 - needs an optional extra
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        raise ConfigError("otel: needs the extra d2lpm-router[otel]") from None
    return OpenTelemetry(connections, settings.policy)
