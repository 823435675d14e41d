"""What the SwanLab server has of a run, asked by the same paths that SwanLab's own package uses.

    project    its cuid, by workspace and name
    run        state and time of creation
    tops       the largest step of every key. May lag behind what was accepted by seconds

A session is opened with the key and used until the server refuses it; then a new one is opened, once.

Source of the paths: swanlab 0.10, sdk/internal/core_python/api.
Must not know: the SDK, batches. On failure: RefusedError.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from verl_shipper.backends.base import Park
from verl_shipper.backends.sdk.http import Http, RefusedError

CLOCK_SLACK_S = 3600  # the server looks for rows from the run's creation on, a time that a trainer's clock gave


@dataclass(frozen=True, slots=True)
class RunAddress:
    """Where a run is at SwanLab."""

    workspace: str
    project: str
    cuid: str


@dataclass(frozen=True, slots=True)
class RunState:
    """What the server says of a run. `tops`: the largest step by key."""

    state: str
    tops: dict[str, int]


class SwanlabApi:
    """Questions with one key. `who` names the key's origin to people."""

    def __init__(self, http: Http, key: str, who: str) -> None:
        self._http = http
        self._key = key
        self._hint = f"the key is from {who}; put a valid one there"
        self._sid = ""
        self._summary: tuple[str, int] | None = None  # path of the run's summary, and where it begins

    def login(self) -> str:
        """Open a session; answers the account's name."""
        said = self._http.ask(
            "POST", "/api/login/api_key", key_hint=self._hint, headers={"authorization": self._key}, auth=_no_netrc
        )
        try:
            self._sid = str(said["sid"])
            return str(said["userInfo"]["username"])
        except (TypeError, KeyError) as error:
            raise RefusedError(
                Park(f"{self._http.base_url} does not answer like SwanLab; is it the API's address?")
            ) from error

    def run(self, address: RunAddress) -> RunState | None:
        """The run as the server shows it now; None when there is none."""
        self._summary = None
        where = f"/api/project/{address.workspace}/{address.project}"
        project = self._ask(where)
        run = self._ask(f"{where}/runs/{address.cuid}") if project is not None else None
        if project is None or run is None:
            return None
        since_s = max(seconds_of(run.get("createdAt")) - CLOCK_SLACK_S, 0)
        self._summary = (f"/api/house/metrics/summaries/{project.get('cuid')}/{run.get('cuid')}", since_s)
        return RunState(str(run.get("state") or ""), self.tops(address))

    def tops(self, address: RunAddress) -> dict[str, int]:
        """The largest step by key, in one question if the run was seen before."""
        if self._summary is None:
            found = self.run(address)
            return found.tops if found else {}
        path, since_s = self._summary
        return tops_of(self._ask(path, {"all": True, "createdAt": since_s}))

    def close(self) -> None:
        self._http.close()

    def _ask(self, path: str, question: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """The answer; None for 404."""
        if not self._sid:
            self.login()
        try:
            return self._get(path, question)
        except RefusedError as refused:
            if refused.status != 401:
                raise
        self.login()
        return self._get(path, question)

    def _get(self, path: str, question: dict[str, Any] | None) -> dict[str, Any] | None:
        cookie = {"Cookie": f"sid={self._sid}"}
        try:
            said = self._http.ask("GET", path, key_hint=self._hint, headers=cookie, params=question, auth=_no_netrc)
        except RefusedError as refused:
            if refused.status == 404:
                return None
            raise
        return said if isinstance(said, dict) else {}


def tops_of(summary: Any) -> dict[str, int]:
    """The largest step by key, of numbers and media, in a summary's answer."""
    tops: dict[str, int] = {}
    for kind in ("scalar", "media"):
        for entry in (summary or {}).get(kind) or ():
            tops[entry["key"]] = max(int(entry["step"]), tops.get(entry["key"], -1))
    return tops


def seconds_of(created: Any) -> int:
    """Seconds since 1970 of a time as SwanLab writes it; 0 when it cannot be read."""
    if isinstance(created, int | float):
        return int(created / 1000 if created > 10**11 else created)
    try:
        head, _, tail = str(created).rstrip("Z").partition(".")
        zone = tail[tail.index("+") :] if "+" in tail else ""
        moment = datetime.fromisoformat(head + zone)
    except ValueError:
        return 0
    return int((moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp())


def _no_netrc(request: Any) -> Any:
    """`requests` would put netrc's password into the header that carries our key."""
    return request
