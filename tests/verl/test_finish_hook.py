"""verl's own finish hook with `verl-shipper push`: the rank's trace is in its run, though a daemon never ran.

Marked `verl`: run by `make test-verl`, whose environment has verl's profilers.
"""

from __future__ import annotations

import pytest

from support.daemon import shipper
from support.site import Site
from support.trainer import run_script

pytestmark = pytest.mark.verl

HOOK = """
import os, sys
from verl.utils.profiler.config import ProfilerConfig
from verl.utils.profiler.profile import DistProfiler
from verl_shipper_client import Client

os.makedirs("traces")
with Client(project="p", experiment="e", run_id="hooked") as client:
    client.log({"a": 1.0}, step=3)
    with open(f"traces/actor_step3_rank0-of-1_pid{os.getpid()}_x.json.gz", "wb") as file:
        file.write(b"trace" * 1000)
    command = f'{sys.executable} -m verl_shipper push "$VERL_PROFILE_SAVE_PATH"'
    config = ProfilerConfig(enable=True, all_ranks=True, save_path="traces", finish_hook_cmd=command)
    profiler = DistProfiler(rank=0, config=config, tool_config=None)
    profiler.start()
    profiler.stop()
"""


def test_the_hook_of_a_rank_ships_its_trace_to_its_run(site: Site) -> None:
    run_script(site, HOOK)

    done = shipper(site, "flush", *site.file_backend(), timeout_s=90)

    assert done.returncode == 0, done.stderr
    (trace,) = (site.out / "p" / "e-hooked.files" / "profiles" / "step_3").iterdir()
    assert trace.read_bytes() == b"trace" * 1000
