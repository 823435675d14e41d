"""Settings of the backend `mlflow`, declared. Must not know: what is done with them."""

from __future__ import annotations

from verl_shipper.backends.mlflow_http import TIMEOUT_S
from verl_shipper.backends.sdk.settings import ca_file_setting
from verl_shipper.schema import Key, Kind

SETTINGS = (
    Key(
        "tracking_uri",
        Kind.URL,
        "`http://`, `https://`, `sqlite:////PATH/mlflow.db`, or what MLflow knows else; a folder, or a link to one, "
        "gets a database: `mlflow.db` and `artifacts/` in it",
        "MLflow's own folder store shows a point twice when it is sent twice",
        "http://tracker:5000",
        otherwise="`./mlruns`, if it is there",
        variables=("MLFLOW_TRACKING_URI",),
    ),
    Key(
        "run_id",
        Kind.TEXT,
        "deliver into this MLflow run instead of finding or creating one; every run of this daemon goes there",
        "for a run that another program has begun",
        "8f3a0c5b2d",
        otherwise="found or created",
        variables=("MLFLOW_RUN_ID",),
    ),
    Key(
        "timeout_s",
        Kind.NUMBER,
        "limit of one request",
        "a server that is silent for longer is asked again later",
        "10",
        default=TIMEOUT_S,
        unit="seconds",
        low=1,
        high=60,
    ),
    ca_file_setting(),
    Key(
        "artifact_location",
        Kind.TEXT,
        "URI where new experiments keep their artifacts",
        "generations and texts are artifacts, and can be large",
        "s3://bucket/mlflow",
        otherwise="the server's; beside the database: `mlartifacts/`",
    ),
    Key(
        "lock_dir",
        Kind.PATH,
        "keeps lanes on one machine from making the same run twice",
        "wants a folder that all daemons of this machine share",
        "/run/lock/verl-shipper",
        otherwise="`<state>/locks`",
    ),
    Key(
        "work_dir",
        Kind.PATH,
        "where shipped files are put together before they go to the tracker",
        "wants a local disk with room for the largest of them",
        "/var/tmp/verl-shipper/mlflow",  # noqa: S108 - an example
        otherwise="`<state>/sdk/mlflow`",
    ),
)
