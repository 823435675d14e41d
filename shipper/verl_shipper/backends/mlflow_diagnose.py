"""What `verl-shipper doctor` finds out about an MLflow server or database.

    http(s)     way, certificate and version by a request of our own; then the SDK asks for one experiment, with the
                credentials it would use for records
    sqlite      folder and disk; the SDK opens the file, if there is one
    others      the SDK asks

Must not know: records. On failure: a Finding.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator

from verl_shipper.backends.mlflow_http import CERTIFICATE, INSECURE, Tracker, database_path
from verl_shipper.backends.mlflow_outcome import KEY_HINT, RefusedError
from verl_shipper.backends.road import Road
from verl_shipper.checks import STEP_S, Answer, Finding, Level, probe
from verl_shipper.folders import disk_findings, folder_findings

TRACES_SINCE = (3, 4)
VERSION = re.compile(rb"(\d{1,4})\.(\d{1,4})[\w.]{0,24}")
USER, PASSWORD, TOKEN = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"


def findings(uri: str, road: Road) -> Iterator[Finding]:
    """Findings about the tracker at `uri`, which `check_uri` has accepted."""
    path = database_path(uri)
    if path is not None:
        yield from folder_findings(os.path.dirname(path), private=False)
        yield from disk_findings(path, "the database")
        if not os.path.exists(path):
            yield Finding(Level.OK, f"{path} does not exist yet; the daemon makes it")
            return
    elif uri.startswith(("http://", "https://")):
        if os.environ.get(INSECURE, "").lower() in ("1", "true"):
            what = f"{INSECURE} is set: the server's certificate is not verified, anybody may read the key"
            yield Finding(Level.WARN, what, f"unset {INSECURE}; export {CERTIFICATE}=/PATH/ca.pem")
        else:
            ca = os.environ.get(CERTIFICATE)
            answer = yield from probe(f"{uri}/version", headers=_headers(), ca=ca, **road.probing())
            if answer is None:
                return
            yield from _version(answer)
    yield _asked(uri, road)


def _headers() -> dict[str, str]:
    """Credentials from the environment, as the SDK sends them."""
    user, password, token = (os.environ.get(name, "") for name in (USER, PASSWORD, TOKEN))
    if user and password:
        return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
    return {"Authorization": f"Bearer {token}"} if token else {}


def _version(answer: Answer) -> Iterator[Finding]:
    found = VERSION.fullmatch(answer.body.strip()) if answer.status == 200 else None
    if found is None:
        return  # a gateway, or an answer that wants a key first
    version = found[0].decode()
    if (int(found[1]), int(found[2])) >= TRACES_SINCE:
        yield Finding(Level.OK, f"the server is MLflow {version}")
    else:
        what = f"the server is MLflow {version}: it takes metrics, and traces only since 3.4"
        yield Finding(Level.WARN, what, "upgrade the server: pip install -U mlflow")


def _asked(uri: str, road: Road) -> Finding:
    """One cheap real request through the SDK."""
    tracker = Tracker(uri, road, timeout_s=STEP_S)
    before = dict(os.environ)
    try:
        tracker.open()
        tracker.ask(tracker.client.search_experiments, max_results=1)
    except RefusedError as refused:
        reason = str(getattr(refused.outcome, "reason", refused.outcome))
        hint = "" if KEY_HINT in reason else "look: curl -v the address, and verl-shipper status for the daemon's view"
        return Finding(Level.FAIL, f"MLflow's own client fails: {reason}", hint)
    finally:
        os.environ.clear()  # what MLflow was told is not meant for the trackers after it
        os.environ.update(before)
    return Finding(Level.OK, f"experiments can be listed{_identity()}")


def _identity() -> str:
    if os.environ.get(USER) and os.environ.get(PASSWORD):
        return f" ({USER})"
    return f" ({TOKEN})" if os.environ.get(TOKEN) else ""
