"""The plugin that verl loads: importing this module is all there is to do.

    verl ≥ 0.9       finds it by itself, through the entry-point group `verl.plugins`
    verl 0.6 to 0.8  VERL_USE_EXTERNAL_MODULES=verl_shipper_client.verl_plugin
    older            import it first, wherever verl is imported: in a sitecustomize.py, or in Ray's workers by
                     worker_process_setup_hook="verl_shipper_client.verl_plugin.install"

Importing it imports nothing of verl, opens nothing and starts nothing: changes are made when verl's modules are
imported, clients when there is something to ship. Again and again, in forks, in Ray's workers: once per process.

What is changed, in place: verl/tracking.py, verl/rollout.py, verl/training.py of this package say. Must not know: verl.
On failure: the job runs as if this were not installed, with a line on stderr.
"""

from __future__ import annotations

from verl_shipper_client.verl import rollout, tracking, training
from verl_shipper_client.verl.patch import safely, when_imported

_state = {"installed": False}


def install() -> None:
    """Ask for our changes. Safe to call again; never raises."""
    if _state["installed"]:
        return
    _state["installed"] = True
    acts = {
        "verl.utils.tracking": tracking.patch,
        "verl.utils.rollout_trace": rollout.patch_trace,
        "verl.experimental.agent_loop.agent_loop": rollout.patch_agent_loop,
        "verl.experimental.agent_loop.tool_agent_loop": rollout.patch_tools,
        training.ENVIRONMENT_MODULE: training.patch_environment,
        **dict.fromkeys(training.TRAINERS, training.patch_trainer),
    }
    for name, act in acts.items():
        safely(lambda name=name, act=act: when_imported(name, act))  # type: ignore[misc]


install()
