"""An OpenTelemetry collector with a store behind it: decodes what came in with the official messages.

    POST /v1/traces     ExportTraceServiceRequest in protobuf, gzip or not

    header              a request without {name: value} of the option `headers` meets 401
    refuse              spans whose bytes hold one of these texts are refused: 200 with partial_success
    warning             error_message of a partial_success that refuses nothing
    answer              [content type, text] instead of the protocol's answer

Spans are kept by (trace id, span id), as stores do; how often each came is counted. Must not know: who sends.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from servers.app import TrackerServer, main

PROTOBUF = "application/x-protobuf"
BODY_BYTES_MAX = 20 * 1024 * 1024  # what the protocol recommends


class OtlpServer(TrackerServer):
    """A collector."""

    def __init__(self, folder: Path) -> None:
        self._spans: dict[str, dict[str, Any]] = {}
        self._encodings: list[str] = []
        self._empty = 0
        super().__init__(folder)

    @classmethod
    def defaults(cls) -> Mapping[str, Any]:
        return {"headers": {}, "refuse": [], "warning": "", "answer": None}

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/traces", self._export)]

    def apply(self, change: dict[str, Any]) -> None:
        self._encodings.append(change["encoding"])
        self._empty += not change["spans"]
        for span in change["spans"]:
            key = f"{span['trace_id']}/{span['span_id']}"
            before = self._spans.pop(key, {"came": 0})
            self._spans[key] = span | {"came": before["came"] + 1}

    def state(self) -> dict[str, Any]:
        return {"spans": list(self._spans.values()), "encodings": self._encodings, "empty": self._empty}

    async def _export(self, request: web.Request) -> web.Response:
        wanted: dict[str, str] = self.options["headers"]
        if any(request.headers.get(name) != value for name, value in wanted.items()):
            shown = " ".join(request.headers.get(name, "") for name in wanted)  # what a careless server echoes
            return web.Response(status=401, text=f"unauthorized: {shown}")
        if request.headers.get("Content-Type") != PROTOBUF:
            return web.Response(status=415)
        body = await request.read()  # aiohttp has undone the gzip
        if len(body) > BODY_BYTES_MAX:
            return web.Response(status=413)
        try:
            message = ExportTraceServiceRequest.FromString(body)
        except DecodeError as error:
            return web.Response(status=400, text=str(error))
        taken, refused = [], 0
        for span, told in _spans_of(message):
            if any(text.encode() in span.SerializeToString() for text in self.options["refuse"]):
                refused += 1
            else:
                taken.append(told)
        self.keep({"spans": taken, "encoding": request.headers.get("Content-Encoding", "none")})
        if self.options["answer"] is not None:
            kind, text = self.options["answer"]
            return web.Response(text=text, content_type=kind)
        answer = ExportTraceServiceResponse()
        if refused or self.options["warning"]:
            answer.partial_success.rejected_spans = refused
            answer.partial_success.error_message = "scripted" if refused else self.options["warning"]
        return web.Response(body=answer.SerializeToString(), content_type=PROTOBUF)


def _spans_of(message: Any) -> Iterable[tuple[Any, dict[str, Any]]]:
    for carrier in message.resource_spans:
        resource = _values(carrier.resource.attributes)
        for scope in carrier.scope_spans:
            for span in scope.spans:
                yield (
                    span,
                    {
                        "trace_id": span.trace_id.hex(),
                        "span_id": span.span_id.hex(),
                        "parent_id": span.parent_span_id.hex(),
                        "name": span.name,
                        "kind": span.kind,
                        "start_ns": span.start_time_unix_nano,
                        "end_ns": span.end_time_unix_nano,
                        "status": span.status.code,
                        "message": span.status.message,
                        "attributes": _values(span.attributes),
                        "resource": resource,
                        "schema": carrier.schema_url,
                        "scope": scope.scope.name,
                        "bytes": base64.b64encode(span.SerializeToString()).decode(),
                    },
                )


def _values(pairs: Any) -> dict[str, Any]:
    found = [(pair.key, _value(pair.value)) for pair in pairs]
    assert len(dict(found)) == len(found), "an attribute came twice"
    return dict(found)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


if __name__ == "__main__":
    main(OtlpServer)
