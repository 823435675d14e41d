"""Names by which verl finds us, and we find verl: what the plugin, the daemon and `doctor` must agree on.

    verl ≥ 0.9            loads the entry points of PLUGIN_GROUP; POLICY_VARIABLE may say `none`, or name others only
    verl 0.6.1 to 0.8     imports the modules in MODULES_VARIABLE
    older                 nothing of the kind

Must not know: anything else.
"""

from __future__ import annotations

PLUGIN_GROUP = "verl.plugins"
PLUGIN_NAME = "shipper"  # in trainer.logger and rollout.trace.backend, too
PLUGIN_MODULE = "verl_shipper_client.verl_plugin"
POLICY_VARIABLE = "VERL_USE_EXTERNAL_PLUGINS"
MODULES_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
TRUE_WORDS = ("1", "true", "yes", "on")
PLUGINS_SINCE = (0, 9)
MODULES_SINCE = (0, 6, 1)


def version_of(text: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: "0.9.1.dev0" → (0, 9, 1)."""
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
