"""The metrics that Prometheus reads at /metrics. Each server has its own registry."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .access_log import Record
from .connections import Connections

PREFIX = "megatron_ssm_"
REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
NEXT_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


@dataclass(frozen=True)
class Load:
    """The load of the engine, and the work of rank 0 since it started. GAUGES and COUNTERS describe the fields."""

    slots: int
    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefix_hits: int = 0
    new_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    bytes_sent: int = 0
    prefix_cache_entries: int = 0
    prefix_cache_bytes: int = 0
    prefix_cache_max_bytes: int = 0


GAUGES = {
    "slots": "Requests that fit into the batch.",
    "running": "Requests in the batch.",
    "waiting": "Requests in the queue.",
    "prefix_cache_entries": "Prefixes in the prefix cache of rank 0.",
    "prefix_cache_bytes": "Memory of the prefix cache of rank 0.",
    "prefix_cache_max_bytes": "The most memory of the prefix cache of a rank.",
}
COUNTERS = {
    "prompt_tokens": "Tokens of prompts that were read.",
    "reused_tokens": "Tokens of prompts that came from the prefix cache.",
    "prefix_hits": "Sequences whose prompts began with tokens from the prefix cache.",
    "new_tokens": "Tokens generated.",
    "proposed_tokens": "Tokens proposed by speculative decoding.",
    "accepted_tokens": "Tokens that replies got by them, beyond one a step.",
    "bytes_sent": "Bytes that rank 0 sent to other ranks.",
}


class Metrics:
    """The metrics of a server. load: A function that returns the load of the engine."""

    def __init__(self, load: Callable[[], Load], connections: Connections):
        self._load, self._connections, self._registry = load, connections, CollectorRegistry()
        self._requests = Counter(
            f"{PREFIX}requests", "HTTP requests by path and status; 499: the client hung up early.", ["path", "status"],
            registry=self._registry,
        )  # fmt: skip
        self._queue = self._histogram("queue_time", "From the arrival of a request to the slot of a reply.")
        self._first_token = self._histogram("time_to_first_token", "From the arrival of a request to a first token.")
        self._next_token = self._histogram("time_per_output_token", "Mean time of the later tokens.", NEXT_TOKEN_S)
        self._duration = self._histogram("request", "From the arrival of a request that got tokens to its end.")
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = REQUEST_S) -> Histogram:
        return Histogram(f"{PREFIX}{name}_seconds", text, buckets=buckets, registry=self._registry)

    def observe_request(self, path: str, record: Record) -> None:
        """Count an HTTP request that has ended, and the time that it has taken if it got tokens."""
        self._requests.labels(path, str(record.status)).inc()
        if record.first_token is not None:
            self._duration.observe(time.monotonic() - record.arrival)

    def observe_first_token(self, seconds: float, queue_s: float) -> None:
        """Record the times from the arrival of a request to the first token of a reply, and to its slot."""
        self._first_token.observe(seconds)
        self._queue.observe(queue_s)

    def observe_reply(self, seconds: float, tokens: int) -> None:
        """Record the time from the first to the last token of a complete reply, which has `tokens` tokens."""
        if tokens > 1:
            self._next_token.observe(seconds / (tokens - 1))

    def collect(self) -> Iterator[Metric]:
        """The numbers of the load and the connections, for the registry."""
        load = self._load()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, getattr(load, name))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, getattr(load, name))
        yield from _connection_metrics(self._connections)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _ConnectionMetrics:
    """The metrics of connections, for a registry."""

    def __init__(self, connections: Connections):
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        """The numbers of the connections."""
        return _connection_metrics(self._connections)


def router_metrics(connections: Connections, replicas: int) -> str:
    """Return the metrics of the router in Prometheus' text format. replicas: the number of those that are ready."""
    registry = CollectorRegistry()
    registry.register(_ConnectionMetrics(connections))
    Gauge(f"{PREFIX}replicas", "Replicas of the model that take requests.", registry=registry).set(replicas)
    ProcessCollector(registry=registry)
    return generate_latest(registry).decode()


def _connection_metrics(connections: Connections) -> Iterator[Metric]:
    yield GaugeMetricFamily(f"{PREFIX}connections", "Connections of clients.", connections.open)
    text = "Connections closed: there were too many, no request had arrived in time, or replies were not read in time."
    closed = CounterMetricFamily(f"{PREFIX}connections_closed", text, labels=["reason"])
    closed.add_metric(["limit"], connections.refused)
    closed.add_metric(["late"], connections.late)
    closed.add_metric(["unread"], connections.unread)
    yield closed
