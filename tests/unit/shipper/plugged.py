"""Backends of a third party, installed in a folder of their own: found by real lane processes through entry points.

    plug(folder) → environment for the daemon's children

    plug_ok        delivers; appends the ordinals it got to the file in its settings (`out`)
    plug_hang      its uploads never come back
    plug_silent    its lane stops turning: the process sleeps inside the lane's own loop
    plug_crash     its lane ends at once, with code 7
    plug_stubborn  ignores its orders: the process blocks in `close`

Must not know: tests. On failure: as the operating system said it.
"""

from __future__ import annotations

from pathlib import Path

SOURCE = """
import os, time
from verl_shipper.backends.base import Backend, Delivered, Limits

class Ok(Backend):
    name = "plug_ok"
    limits = Limits(age_s_max=0.0)
    def open(self): return None
    def upload(self, batch):
        with open(self.settings["out"], "a") as out:
            out.write("".join(f"{item.ordinal}\\n" for item in batch.items))
        return Delivered()
    def watermark(self): return {}
    def close(self): pass

class Hang(Ok):
    name = "plug_hang"
    def upload(self, batch):
        with open(self.settings["out"], "a") as out:
            out.write("hung\\n")
        time.sleep(3600)

class Silent(Ok):
    name = "plug_silent"
    def __init__(self, *arguments):
        super().__init__(*arguments)
        time.sleep(3600)  # made in the lane's own loop

class Crash(Ok):
    name = "plug_crash"
    def __init__(self, *arguments):
        super().__init__(*arguments)
        os._exit(7)

class Stubborn(Ok):
    name = "plug_stubborn"
    def close(self):
        time.sleep(3600)
"""

NAMES = {
    "plug_ok": "Ok",
    "plug_hang": "Hang",
    "plug_silent": "Silent",
    "plug_crash": "Crash",
    "plug_stubborn": "Stubborn",
}


def plug(folder: Path) -> str:
    """Install the backends below `folder`; returns what PYTHONPATH has to be."""
    folder.mkdir()
    (folder / "plugged_backends.py").write_text(SOURCE)
    info = folder / "plugged_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged-backends\nVersion: 1.0\n")
    lines = [f"{name} = plugged_backends:{made}" for name, made in NAMES.items()]
    (info / "entry_points.txt").write_text("[verl_shipper.backends]\n" + "\n".join(lines) + "\n")
    return str(folder)
