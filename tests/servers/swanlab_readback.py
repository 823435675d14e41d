"""What the SwanLab test server answers to readers: the paths behind `swanlab.Api`.

Every question names its columns as {experimentId, key, createdAt}; createdAt (seconds) is required, as at the real
service, where it bounds the search. An unknown experiment raises what the server's `run_of` raises.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from servers.swanlab_store import Project, Row, Run


class Reader:
    """Read-only questions. `run_of` (cuid, project) finds a run, `seen` (rows, created_at) hides what is too young."""

    def __init__(
        self, run_of: Callable[[str, str | None], Run], seen: Callable[[list[Row], str | int], list[Row]]
    ) -> None:
        self._run_of = run_of
        self._seen = seen

    def scalars(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Points in the order of their index; of more than `num` of them, evenly spaced ones."""
        answer = []
        for column, rows in self._columns(body, "scalar"):
            rows.sort(key=lambda row: row.index)
            most = min(int(body.get("num") or len(rows)), len(rows))
            told = [rows[place * len(rows) // most] for place in range(most)]
            points = [{"index": row.index, "data": row.data, "timestamp": _milliseconds(row)} for row in told]
            answer.append({**column, "projectId": body["projectId"], "metrics": points})
        return answer

    def values(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{**column, **statistics(rows)} for column, rows in self._columns(body, "scalar")]

    def table(self, body: Mapping[str, Any]) -> bytes:
        """All rows as CSV, one line a step; of rows with the same step the first is told."""
        table: dict[int, dict[str, Row]] = {}
        keys = [column["key"] for column in body["columns"]]
        for column, rows in self._columns(body, "scalar"):
            for row in rows:
                table.setdefault(row.index, {}).setdefault(column["key"], row)
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["step", *(f"{key}_{end}" for key in keys for end in ("step", "timestamp"))])
        for step, held in sorted(table.items()):
            cells = [(held[key].data, _milliseconds(held[key])) if key in held else ("", "") for key in keys]
            writer.writerow([step, *(cell for pair in cells for cell in pair)])
        return text.getvalue().encode()

    def media(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The rows of one step (the last one if none is asked for), and which steps there are."""
        found = [(column["key"], row) for column, rows in self._columns(body, "media") for row in rows]
        steps = sorted({row.index for _, row in found})
        step = body.get("step", steps[-1] if steps else None)
        metrics = [{"key": key, "data": row.data, "more": row.more} for key, row in found if row.index == step]
        return {"steps": steps, "step": step, "metrics": metrics}

    def logs(self, query: Mapping[str, str]) -> dict[str, Any]:
        run = self._run_of(query["experimentId"], query["projectId"])
        rows = [row for row in self._seen(run.logs, query["createdAt"]) if row.index >= int(query.get("epoch", 0))]
        rows = rows[: int(query.get("size", 1000))]
        lines = [
            {"epoch": row.index, "level": row.more, "message": row.data, "timestamp": row.create_time} for row in rows
        ]
        return {"logs": lines, "count": len(lines)}

    def _columns(self, body: Mapping[str, Any], kind: str) -> Iterator[tuple[dict[str, Any], list[Row]]]:
        for column in body["columns"]:
            run = self._run_of(column["experimentId"], body["projectId"])
            yield column, self._seen(run.rows(kind).get(column["key"], []), column["createdAt"])


def columns(run: Run, project: Project, query: Mapping[str, str]) -> dict[str, Any]:
    """One page of the series of which `run` holds rows."""
    held = run.scalars.keys() | run.media.keys()
    listed = [
        {**series, "name": key, "class": "SYSTEM" if series["type"] == "SYSTEM" else "CUSTOM"}
        for key, series in project.series.items()
        if key in held and query.get("search", "") in key
    ]
    size, page = int(query.get("size", 20)), int(query.get("page", 1))
    pages = max(1, -(-len(listed) // size))
    return {"list": listed[(page - 1) * size : page * size], "total": len(listed), "pages": pages, "size": size}


def _milliseconds(row: Row) -> int:
    return int(row.at_s * 1000)


def statistics(rows: list[Row]) -> dict[str, Any]:
    """Smallest, largest, mean, median and latest of one key's rows, each as {index, data}."""
    numbers = sorted((row for row in rows if isinstance(row.data, int | float)), key=lambda row: row.data)
    if not numbers:
        return {}
    mean = sum(row.data for row in numbers) / len(numbers)
    places = {"min": numbers[0], "max": numbers[-1], "median": numbers[len(numbers) // 2]}
    places["latest"] = max(numbers, key=lambda row: row.index)
    told: dict[str, Any] = {name: {"index": row.index, "data": row.data} for name, row in places.items()}
    return {**told, "avg": {"data": mean}}
