"""Shipped files as artifacts of an MLflow run.

    profiles/step_40/trace.json.gz        names: file_names.py; the same file again replaces itself

To a server that keeps artifacts itself a file goes as one streamed PUT, never read into memory as a whole; every block
that goes out tells the lane that the upload is no hung one. Anywhere else (a database's folder, a bucket of one's own)
the SDK's `log_artifact` does it, which tells nothing: there a limit by size has to do.

Must not know: records, batches, other artifacts. On failure: RefusedError.
"""

from __future__ import annotations

import contextlib
import io
import mimetypes
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verl_shipper.backends.base import Memory
from verl_shipper.backends.file_assembly import Staging, Taken, Whole, staging_root
from verl_shipper.backends.file_names import Places
from verl_shipper.backends.mlflow_http import Tracker
from verl_shipper.backends.mlflow_plan import Request
from verl_shipper.backends.mlflow_run import Place
from verl_shipper.backends.paths import ARTIFACT_FORBIDDEN
from verl_shipper_spool.files import RealFiles

SEND_S_MIN = 30.0  # how long a server may take none of a file's bytes
ANSWER_S = 60.0  # how long it may be silent when it has all of them, and more for a large one:
ANSWER_BYTES_PER_S = 10 * 1024 * 1024
BYTES_PER_S_MIN = 256 * 1024  # the slowest upload that is none that hangs, where nothing is seen of it
SLACK_S = 60.0
NOTE = "file_places"

Busy = Callable[[float], None]


class Files:
    """The shipped files of one run. `busy(s)`: the upload under way may take that much longer."""

    def __init__(self, tracker: Tracker, settings: Mapping[str, Any], run_id: str, memory: Memory, busy: Busy) -> None:
        self._tracker = tracker
        self._memory = memory
        self._busy = busy
        self._places = Places(memory.get(NOTE))
        self.staging = Staging(staging_root(settings, "mlflow"), tracker.uri, run_id)

    def requests(self, taken: Taken, place: Place) -> list[Request]:
        """One request a file. Where it goes is durable before anybody sees it."""
        paths = [(whole, self._places.place(whole, ARTIFACT_FORBIDDEN)) for whole in taken.wholes]
        if self._places.is_changed:
            self._memory.put(NOTE, self._places.notes())
        return [Request((whole.index,), self._sender(whole, path, place)) for whole, path in paths]

    def _sender(self, whole: Whole, path: str, place: Place) -> Callable[[Sequence[int]], None]:
        def send(_items: Sequence[int]) -> None:
            self._tracker.ask(self._put, whole, path, place)

        return send

    def _put(self, whole: Whole, path: str, place: Place) -> None:
        client = self._tracker.client
        repository_of = getattr(getattr(client, "_tracking_client", None), "_get_artifact_repo", None)
        repository = repository_of(place.run_id) if repository_of is not None else None
        if _is_at_server(repository) and not _goes_in_pieces(repository, whole.path):
            self._stream(repository, whole, path)
            return
        self._busy(SLACK_S + whole.size / BYTES_PER_S_MIN)
        folder, name = posixpath.split(path)
        with _named(whole.path, name) as local:
            client.log_artifact(place.run_id, local, folder)
        _sync(repository, path)

    def _stream(self, repository: Any, whole: Whole, path: str) -> None:
        from mlflow.utils.rest_utils import augmented_raise_for_status, http_request

        answer_s = ANSWER_S + whole.size / ANSWER_BYTES_PER_S
        send_s = max(self._tracker.timeout_s, SEND_S_MIN)
        kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
        with Watched(whole.path, lambda: self._busy(send_s + answer_s + SLACK_S)) as source:
            response = http_request(
                repository._host_creds,  # noqa: SLF001 - the SDK's own words for where and as whom
                f"/{path}",
                "PUT",
                data=source if whole.size else b"",
                extra_headers={"Content-Type": kind},
                timeout=(send_s, answer_s),
            )
        augmented_raise_for_status(response)


class Watched(io.FileIO):
    """A file that tells whenever some of it is read."""

    def __init__(self, path: str, tell: Callable[[], None]) -> None:
        super().__init__(path)
        self._tell = tell

    def read(self, size: int | None = -1, /) -> bytes:
        self._tell()
        return super().read(-1 if size is None else size) or b""


@contextlib.contextmanager
def _named(path: str, name: str) -> Iterator[str]:
    """The file under the name that it is to have: the SDK knows no other."""
    folder = f"{path}.named"
    os.makedirs(folder, 0o700, exist_ok=True)
    link = os.path.join(folder, name)
    try:
        with contextlib.suppress(FileExistsError):
            os.symlink(path, link)
        yield link
    finally:
        with contextlib.suppress(OSError):
            os.unlink(link)
            os.rmdir(folder)


def _is_at_server(repository: Any) -> bool:
    """Whether artifacts go to an MLflow server by plain HTTP. By name, as long as nobody needs the class itself."""
    return any(kind.__name__ == "HttpArtifactRepository" for kind in type(repository).__mro__)


def _goes_in_pieces(repository: Any, path: str) -> bool:
    """Whether the operator lets the SDK send large files in pieces, past the server."""
    wants = getattr(repository, "_should_multipart_upload", None)
    return callable(wants) and bool(wants(path))


def _sync(repository: Any, path: str) -> None:
    """MLflow does not see to it that a file in a folder of ours survives a power failure."""
    folder = getattr(repository, "artifact_dir", None)
    local = os.path.join(folder, path) if isinstance(folder, str) else ""
    if local and os.path.isfile(local):
        RealFiles().sync_file(local)
        RealFiles().sync_folder(os.path.dirname(local))
