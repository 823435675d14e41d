"""The trainer of the kill tests: counts. Arguments: PROJECT RUN_ID FIRST COUNT PACE_S LEDGER PAD_BYTES.

A line goes into the ledger after `log()` has returned, by one write, so that a kill between the two leaves
at most one record that the ledger does not know. Run as a program, never imported.
"""

from __future__ import annotations

import os
import sys
import time

from verl_shipper_client import Client


def main() -> None:
    project, run_id, first, count, pace_s, ledger_path, pad_bytes = sys.argv[1:]
    ledger = os.open(ledger_path, os.O_WRONLY | os.O_APPEND)
    client = Client(project, "exp", config={"lr": 0.1}, run_id=run_id, rank=0)
    pad = {"pad": "x" * int(pad_bytes)} if int(pad_bytes) else {}
    for value in range(int(first), int(first) + int(count)):
        client.log({"n": float(value), **pad}, step=value)
        os.write(ledger, b"%d %.6f\n" % (value, time.time()))
        if float(pace_s):
            time.sleep(float(pace_s))
    client.finish(exit_code=0)


if __name__ == "__main__":
    main()
