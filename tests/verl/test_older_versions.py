"""The plugin in older versions of verl, each from its own wheel: metrics, generations, traces, the end of the run."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.shipped import flush, spooling
from support.site import Site
from support.verl_job import KIT, job_environment

pytestmark = [pytest.mark.verl, pytest.mark.timeout(300)]

WHEELS = Path(sys.prefix) / "verl-wheels"  # `make test-verl` puts them there
VERSIONS = ("0.6.1", "0.7.1", "0.8.0", "0.9.0")
BY_ENTRY_POINT = ("0.9.0",)  # the others are told by VERL_USE_EXTERNAL_MODULES


@pytest.mark.parametrize("version", VERSIONS)
def test_everything_is_shipped_from_an_older_verl_and_its_trackers_are_not_imported(
    version: str, tmp_path: Path
) -> None:
    (wheel,) = WHEELS.glob(f"verl-{version}-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "old")
    site = Site(tmp_path / "site")
    modules = "" if version in BY_ENTRY_POINT else "verl_shipper_client.verl_plugin"
    environment = spooling(
        site,
        PYTHONPATH=str(tmp_path / "old"),
        VERL_USE_EXTERNAL_MODULES=modules,
        VERL_SHIPPER_TAKEOVER="1",
    )
    done = subprocess.run(
        [sys.executable, str(KIT / "old_verl.py")],
        env=job_environment(tmp_path, environment),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"version {version}" in done.stdout
    assert "imported []" in done.stdout

    records = flush(site)
    assert records.metrics() == [(1, {"actor/loss": 0.5}), (2, {"actor/loss": 0.25})]
    (table,) = records.of("generations")
    assert (table["step"], table["data"]["rows"]) == (2, [["2+2?", "4", 1.0]])
    (spans,) = records.traces()
    assert [span["name"].rpartition(".")[2] for span in spans] == ["generate", "run", "agent_loop"]
    assert spans[-1]["attributes"]["reward"] == 1.0
    assert spans[-1]["inputs"] == {"messages": [{"role": "user", "content": "2+2?"}]}
    assert [line["data"]["exit_code"] for line in records.of("run_finish")] == [0]
    assert len(records.runs()) == 1
