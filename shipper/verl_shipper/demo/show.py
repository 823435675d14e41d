"""The demo, whole: a daemon, a real little training, three destinations, and the account at the end.

Everything stays below one folder; nothing outside it is read or changed. Must not know: how the training works.
On failure: the exit code of whatever failed.
"""

from __future__ import annotations

import os
import sys

from verl_shipper import serve
from verl_shipper.config import Config
from verl_shipper.errors import ShipperError
from verl_shipper.status import report
from verl_shipper_spool.location import SPOOL_VARIABLE

DRAIN_S = 120.0


def run_demo(out: str, steps: int) -> int:
    """Run it below the folder `out`. Returns an exit code."""
    out = os.path.abspath(os.path.expanduser(out))
    try:
        os.makedirs(out, exist_ok=True)
    except OSError as error:
        raise ShipperError(f"cannot make {out}: {error.strerror}", hint="choose another folder with --out") from error
    config = _config(out)
    os.environ[SPOOL_VARIABLE] = os.path.join(out, "spool")
    trainer = [sys.executable, "-m", "verl_shipper.demo.train", "--steps", str(steps)]
    code = serve.beside(config, trainer, DRAIN_S)
    _print_account(config, out)
    return code


def _config(out: str) -> Config:
    backends: dict[str, dict[str, str]] = {
        "file": {"dir": os.path.join(out, "records")},
        "console": {"stream": "stdout"},
    }
    try:
        import mlflow  # noqa: F401 - only whether it is there
    except ImportError:
        sys.stderr.write("verl-shipper: MLflow is not installed, the demo goes on without it; pip install mlflow\n")
    else:
        backends["mlflow"] = {"tracking_uri": f"sqlite:///{out}/mlflow.db"}
    return Config(backends=backends, spool_dir=os.path.join(out, "spool"), state_dir=os.path.join(out, "state"))


def _print_account(config: Config, out: str) -> None:
    from rich.console import Console

    from verl_shipper.show import status_table

    found = report(os.path.join(out, "state"), config.backends)
    Console().print(status_table(found))
    here = os.path.dirname(sys.executable)  # nobody has activated the environment
    lines = [f"\nrecords as JSON lines:  {out}/records/"]
    if "mlflow" in config.backends:
        lines.append(
            f"the MLflow page:        {here}/mlflow ui --backend-store-uri sqlite:///{out}/mlflow.db --port 5000"
        )
        lines.append("                        then open http://127.0.0.1:5000")
    lines.append(f"what was kept:          {here}/verl-shipper status --state-dir {out}/state")
    sys.stdout.write("\n".join(lines) + "\n")
