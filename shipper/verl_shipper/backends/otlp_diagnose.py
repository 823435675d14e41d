"""What `verl-shipper doctor` finds out about a collector: headers, way, certificate, and whether it takes a request
without spans, which the protocol asks it to answer with success.

Must not know: records. On failure: a Finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_shipper.backends.otlp_http import PROTOBUF, partial_success
from verl_shipper.backends.otlp_settings import KEY_HINT, endpoint_of, headers_of, otlp_road
from verl_shipper.checks import Answer, Finding, Level, probe
from verl_shipper.errors import ConfigError
from verl_shipper.route import shown


def findings(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about the collector that `settings` name."""
    try:
        headers, origin = headers_of(settings)
    except ConfigError as error:
        yield Finding(Level.FAIL, f"{error.what}{f' [{error.where}]' if error.where else ''}", error.hint)
        return
    if origin:
        yield Finding(Level.OK, f"secret headers found: {origin}")
    url, road = endpoint_of(settings), otlp_road(settings)
    way = road.probing() | ({"ca": road.base_files[0]} if road.base_files else {})
    sent = {**headers, "Content-Type": PROTOBUF}
    answer = yield from probe(url, method="POST", headers=sent, body=b"", **way)  # an empty message has no bytes
    if answer is not None:
        yield from _judged(answer, url, origin)


def _judged(answer: Answer, url: str, origin: str) -> Iterator[Finding]:
    status, place = answer.status, shown(url)
    if status in (401, 403):
        what = f"the headers from {origin} are refused ({status})" if origin else f"it wants a key ({status})"
        yield Finding(Level.FAIL, what, KEY_HINT)
    elif status == 200:
        try:
            partial_success(answer.headers.get("content-type", ""), answer.body)
        except ValueError:
            yield Finding(Level.FAIL, f"{place} does not answer like a collector", "check backends.otlp.endpoint")
        else:
            yield Finding(Level.OK, "an empty request is accepted")
    elif status in (400, 422):
        yield Finding(Level.WARN, f"an empty request is refused ({status}); spans may be taken all the same")
    elif status != 429 and status < 500:
        hint = "give its address for OTLP over HTTP, mostly port 4318: backends.otlp.endpoint"
        yield Finding(Level.FAIL, f"{place} is no collector for OTLP over HTTP ({status})", hint)
