"""Prometheus metrics of one API process. Labels are routes and codes, never tenants or ids."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "finery_http_requests", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "finery_http_request_seconds",
            "Seconds from the first byte in to the last one out.",
            ["method", "route"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.streams = Gauge("finery_event_streams", "Event streams open now.", registry=self.registry)
        self.uploaded_bytes = Counter(
            "finery_uploaded_bytes", "Bytes of data files received and kept.", registry=self.registry
        )

        self.open_jobs = Gauge(
            "finery_open_jobs", "Jobs of all tenants that have not ended, by state.", ["state"], registry=self.registry
        )
        self.oldest_queued = Gauge(
            "finery_oldest_queued_seconds", "How long the job that waits longest has waited.", registry=self.registry
        )

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
