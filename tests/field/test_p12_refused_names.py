"""P12: metric names a destination refuses. Here they are changed, the same way for ever, and `status` tells how."""

from __future__ import annotations

import json

from support import oracle
from support.daemon import shipper
from support.four_trackers import FourTrackers
from support.mlflow_server import MlflowServer
from support.site import Site
from support.trainer import run_script

TRAINER = """
import json, sys
from verl_shipper_client import Client

project, run_id, step, names = sys.argv[1:]
with Client(project, "exp", run_id=run_id) as client:
    client.log({name: float(place) for place, name in enumerate(json.loads(names))}, step=int(step))
"""
PUBLISHED = [
    "timing(s)/gen",
    "val/pass@8",
    "train/lr(1e-3)",
    "/lead",
    "../up",
    "a//b",
    "k" * 300,
    "奖励/均值",
    "val/😀",
    "ok",
]
# Several originals that look alike once they are changed, ends and beginnings of all sorts, and what trackers reserve.
SIBLINGS = [
    "a(b)", "a[b]", "a{b}", "A(B)", "ok", "OK", "x" * 250, "x" * 251, "x" * 600, "x" * 599 + "y", "é" * 300,
    "", " ", "/", "//", ".", "..", "./a", "a/", "a/../b", "a\\b", "a\tb", "a\nb", " lead", "trail ", "50%", "a?b=c&d",
    "_step", "_timestamp", "_runtime", "_wandb", "__swanlab__.x", "step", "key", "system/cpu", "a" + "/b" * 90,
    "🙂" * 200, "#1", "val/pass@8", "val/pass_at_8", "loss,actor", "'quoted'", "unnamed",
    '"double"', "$lr", "β₁", "مكافأة", "a\x00b",
]  # fmt: skip


def test_p12_refused_names_are_changed_for_ever_and_told(site: Site, mlflow_server: MlflowServer) -> None:
    with FourTrackers(site, mlflow_server) as trackers, trackers.daemon() as daemon:
        for step in (1, 2):
            run_script(site, TRAINER, trackers.project, "published", step, json.dumps(PUBLISHED))
            run_script(site, TRAINER, trackers.project, "siblings", step, json.dumps(SIBLINGS[:: (1, -1)[step == 2]]))
            status = daemon.wait_settled(6 * step, timeout_s=120)
            daemon.stop()
            daemon.start()
        oracle.assert_law(status, pending=0)

        for name in trackers.names:
            assert status["backends"][name]["delivered"] == 12, name
            assert not status["backends"][name]["ignored_values"], name
            for run_id, names in (("published", PUBLISHED), ("siblings", SIBLINGS)):
                series = trackers.series(name, run_id)
                assert len(series) == len(names), (name, run_id, sorted(series))
                reverse = run_id == "siblings"
                found = sorted(sorted(points) for points in series.values())
                places = range(len(names))
                assert found == [[(1, n), (2, len(names) - 1 - n if reverse else n)] for n in places], (name, run_id)
            assert trackers.values(name, "published", "ok") == [(1, 9.0), (2, 9.0)], name
        for name in ("mlflow", "swanlab"):  # `file` and wandb take all of the published names as they are
            for run_id, names in (("published", PUBLISHED), ("siblings", SIBLINGS)):
                shown = trackers.keys(name, run_id)
                renamed = status["backends"][name]["runs"][run_id]["renamed"]
                assert set(renamed.values()) <= shown, name
                assert renamed.keys() >= set(names) - shown, name
                assert renamed.keys() <= set(names), name
    told = shipper(site, "status", env={"COLUMNS": "400"}).stdout

    renamed = status["backends"]["mlflow"]["runs"]["published"]["renamed"]
    assert renamed.keys() == set(PUBLISHED) - {"ok", "奖励/均值"}
    assert renamed["val/pass@8"] == "val/pass_at_8"
    assert "renamed at mlflow: " in told
    assert "renamed at swanlab: " in told
