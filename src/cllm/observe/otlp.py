"""Whether traces are wanted, and where they are sent: `observe.otlp_endpoint`, or the variables that OpenTelemetry's
specification names."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cllm.errors import ConfigError
from cllm.machine import install_extra

if TYPE_CHECKING:
    from cllm.config import ObserveConfig
    from cllm.observe.tracing import Tracing

log = logging.getLogger("cllm.tracing")

_PROTOCOL = "http/protobuf"
_PATH = "/v1/traces"


def open_tracing(config: ObserveConfig, environ: Mapping[str, str] = os.environ) -> Tracing | None:
    """None if no collector is named."""
    endpoint = traces_endpoint(config, environ)
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from cllm.observe.tracing import OneWarning, Tracing
    except ImportError as error:
        if config.otlp_endpoint is not None:
            how = install_extra("otel")
            raise ConfigError(
                f"observe.otlp_endpoint is set, but OpenTelemetry is not installed; install it with: {how}"
            ) from error
        # The variable may be meant for other programs.
        log.warning("no traces are sent to %s: OpenTelemetry is not installed (%s)", endpoint, install_extra("otel"))
        return None
    log.info("traces are sent to %s", endpoint)
    return Tracing(OneWarning(OTLPSpanExporter(endpoint=endpoint), endpoint))


def traces_endpoint(config: ObserveConfig, environ: Mapping[str, str]) -> str | None:
    """The address that takes traces. The setting goes before the variables."""
    if config.otlp_endpoint is not None:
        given = config.otlp_endpoint.rstrip("/")
        return given if given.endswith(_PATH) else given + _PATH
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not endpoint and (base := environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")):
        endpoint = base.rstrip("/") + _PATH
    disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not endpoint or disabled or environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return None
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", _PROTOCOL):
        log.warning("no traces are sent to %s: the protocol is %s; cLLM has only %s", endpoint, protocol, _PROTOCOL)
        return None
    return endpoint
