"""What the control plane shows: metrics, reports and explanations, read from the front and the scheduler."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from router.auth.identity import Identifier
from router.channel.host import Observer
from router.config.settings import Settings
from router.control.admin import Operations, needs_key
from router.control.operator_access import admin_api_is_open
from router.control.page.feed import PageFeed
from router.control.page.routes import Page
from router.control.usage_export import UsageExport
from router.core.model.cost import LinearCost
from router.core.model.request import RequestId, WorkerId
from router.core.scheduler import Scheduler
from router.front.drain import Drain
from router.process.scheduling import SchedulerSide
from router.telemetry.cache_alarm import CacheAlarm
from router.telemetry.explain import Explanation, Explanations, RecentDecision
from router.telemetry.history import FairnessHistory
from router.telemetry.loop_lag import LoopLag
from router.telemetry.metrics.component_metrics import BuildInfo, EventMetrics, FileMetrics, StoredMetrics, WrittenFile
from router.telemetry.metrics.counts import ClientLabels
from router.telemetry.metrics.exposition import render_metrics
from router.telemetry.metrics.handoff_metrics import HandoffMetrics
from router.telemetry.metrics.request_metrics import RequestMetrics
from router.telemetry.metrics.state_metrics import StateCollector
from router.telemetry.report import (
    FairnessReport,
    UsageReport,
    WorkerReport,
    fairness_report,
    usage_of_all,
    usage_report,
    worker_reports,
)
from router.telemetry.session_report import SHOWN, GateMetrics, GateReport, gate_of, gate_report, session_entry


class RequestRecords:
    """What is recorded of requests as they pass: metrics, explanations, and an alarm for wrong cache predictions."""

    def __init__(self, policy: str, cost: LinearCost) -> None:
        self._cost = cost
        self.registry: Final = CollectorRegistry()
        self.labels: Final = ClientLabels()
        self.explanations: Final = Explanations(policy)

    def observers(self, scheduler: Scheduler) -> Sequence[Observer]:
        """Return the observers that record the events of a scheduler."""
        return [
            RequestMetrics(self.registry, self.labels, self._cost),
            HandoffMetrics(self.registry, scheduler.handoffs),
            self.explanations,
            CacheAlarm(scheduler.mirror),
        ]


class Insight:
    """Answers what the control plane asks (`Reports`), from the front and the scheduler."""

    def __init__(
        self,
        settings: Settings,
        side: SchedulerSide,
        identifier: Identifier,
        records: RequestRecords,
        takeover: WrittenFile | None = None,
    ) -> None:
        """`identifier`: says which client asks for its usage; `takeover`: from which another run can take over."""
        self._policy = settings.policy
        self._side = side
        self._identifier = identifier
        self._records = records
        self._state_metrics = StateCollector(records.labels)
        self.lag: Final = LoopLag()
        self.history: Final = FairnessHistory(self.fairness)
        self.register(
            self._state_metrics,
            GateMetrics(partial(self.sessions, shown=0)),
            EventMetrics(side.kv_events.report),
            self.lag,
            FileMetrics({"state": side.state, "journal": side.journal, "takeover": takeover}),
            StoredMetrics(side.stored),
            BuildInfo(settings.policy),
        )

    def register(self, *collectors: Collector) -> None:
        """Show more metrics."""
        for collector in collectors:
            self._records.registry.register(collector)

    async def fairness(self) -> FairnessReport:
        """Return the report of /fairness."""
        host = self._side.host
        return await fairness_report(
            self._policy, host.scheduler, self._side.directory, host.clock(), self._unusable_answers()
        )

    async def workers(self) -> Mapping[WorkerId, WorkerReport]:
        """Return the report of each worker."""
        return await worker_reports(self._side.host.scheduler, self._side.directory, self._unusable_answers())

    async def metrics(self) -> bytes:
        """Return all metrics as text."""
        self._state_metrics.report = await self.fairness()
        return await render_metrics(self._records.registry)

    def explain(self, request: str) -> Explanation:
        """Return what is remembered of a request. Raises UnknownRequest."""
        host = self._side.host
        explained = self._records.explanations.explain(request, host.clock(), time.time())
        entry = session_entry(gate_of(host.scheduler.policy), RequestId(request), host.clock())
        return explained if entry is None else replace(explained, session=entry)

    def sessions(self, shown: int = SHOWN) -> GateReport:
        """Return the report of /sessions, with at most this many of them."""
        host = self._side.host
        return gate_report(gate_of(host.scheduler.policy), host.clock(), shown)

    def latest_decisions(self) -> Sequence[RecentDecision]:
        """Return the scheduler's latest decisions, oldest first."""
        return self._records.explanations.latest_decisions(self._side.host.clock(), time.time())

    def usage(self, headers: Mapping[bytes, bytes], address: str | None) -> UsageReport:
        """Return the usage of the client that calls. Raises InvalidKey."""
        who = self._identifier.identify(headers, None, address)
        return usage_report(self._side.host.scheduler, who, self._identifier.directory.prices, self._bases())

    def usage_of_all(self, first: date, last: date) -> UsageExport:
        """Return the usage of all clients from the first to the last day, both included."""
        prices = self._identifier.directory.prices
        batches = usage_of_all(self._side.host.scheduler, first, last, prices, self._bases())
        return UsageExport(prices.currency, batches)

    def _bases(self) -> Mapping[str, str]:
        """Return the base model of each adapter."""
        endpoints = self._side.directory.endpoints
        return {adapter: base for endpoint in endpoints for adapter, base in endpoint.parents.items()}

    def _unusable_answers(self) -> Mapping[WorkerId, int]:
        return self._side.workers.poller.unusable_answers()


def build_operations(settings: Settings, side: SchedulerSide, insight: Insight) -> Operations | None:
    """Build the operators' actions; None if the settings allow none."""
    if not admin_api_is_open(settings):
        return None
    workers, host = side.workers, side.host
    return Operations(
        side.directory,
        workers.registry,
        workers.drain,
        workers.poller.flush,
        insight.history,
        settings,
        host.feed,
        host.scheduler.weights,
        insight.usage_of_all,
    )


def build_page(settings: Settings, insight: Insight, drain: Drain) -> Page:
    """Build the live page. Its streams end once `drain` has begun."""
    feed = PageFeed(insight.fairness, insight.latest_decisions, lambda: drain.begun)
    insight.register(feed)
    return Page(feed, insight.history, needs_key(settings))
