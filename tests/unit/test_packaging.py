"""The package as it is published: what is in it, what it pulls in, what it starts."""

from __future__ import annotations

import configparser
import importlib
import pkgutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import verl_shipper
import verl_shipper_client
import verl_shipper_spool

ROOT = Path(__file__).parents[2]
PACKAGES = {"verl_shipper": "shipper", "verl_shipper_client": "client", "verl_shipper_spool": "spool"}
HEAVY = (
    *("torch", "numpy", "asyncio", "sqlite3", "click", "rich", "omegaconf", "watchdog", "psutil", "pynvml"),
    *("wandb", "mlflow", "swanlab", "trackio"),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def _info(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = [member for member in wheel.namelist() if member.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    members = [member for member in wheel.namelist() if ".dist-info/" not in member]

    assert {member.split("/")[0] for member in members} == set(PACKAGES)
    for package, folder in PACKAGES.items():
        sources = {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder / package).rglob("*.py")}
        assert sources <= set(members)
        assert f"{package}/py.typed" in members
    assert not [member for member in members if "__pycache__" in member or "test" in Path(member).name.split("_")]


def test_the_wheel_brings_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    scripts = configparser.ConfigParser()
    scripts.read_string(_info(wheel, "entry_points.txt"))

    assert dict(scripts["console_scripts"]) == {"verl-shipper": "verl_shipper.cli:main"}
    assert dict(scripts["verl.plugins"]) == {"shipper": "verl_shipper_client.verl_plugin"}
    assert [member for member in wheel.namelist() if member.endswith("LICENSE")]


def test_the_metadata_says_what_it_needs(wheel: zipfile.ZipFile) -> None:
    metadata = Parser().parsestr(_info(wheel, "METADATA"))
    needs = metadata.get_all("Requires-Dist") or []

    assert metadata["Version"] == verl_shipper.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    always = {need.split(">")[0].strip() for need in needs if "extra ==" not in need}
    assert always == {"pyzmq", "msgpack", "watchdog", "click", "rich", "omegaconf", "psutil", "nvidia-ml-py"}
    assert {"wandb", "mlflow", "swanlab", "trackio", "otlp", "all", "test"} <= set(
        metadata.get_all("Provides-Extra") or []
    )


def test_the_source_distribution_can_be_built_and_tested(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    for wanted in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "Makefile",
        "client/verl_shipper_client/client.py",
        "spool/verl_shipper_spool/py.typed",
        "tests/conftest.py",
        "tests/unit/test_packaging.py",
    ):
        assert wanted in names
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".seg", ".sqlite3"))]


def test_the_command_is_installed() -> None:
    (script,) = [entry for entry in entry_points(group="console_scripts") if entry.name == "verl-shipper"]

    assert callable(script.load())


@pytest.mark.parametrize(
    "package", [verl_shipper, verl_shipper_client, verl_shipper_spool], ids=lambda each: each.__name__
)
def test_what_a_package_offers_is_there_and_in_order(package: object) -> None:
    names = getattr(package, "__all__", [])

    assert list(names) == sorted(names)
    assert all(hasattr(package, name) for name in names)


def test_the_client_offers_what_the_documents_name() -> None:
    assert verl_shipper_client.__all__ == ["Client", "Span"]


def _modules() -> list[str]:
    """All modules of ours that need nothing but our own dependencies."""
    packages = (verl_shipper, verl_shipper_client, verl_shipper_spool)
    walks = [pkgutil.walk_packages(package.__path__, f"{package.__name__}.") for package in packages]
    return [module.name for walk in walks for module in walk if not module.name.endswith("__main__")]


def test_every_module_says_what_lives_in_it() -> None:
    for name in _modules():
        path = importlib.util.find_spec(name)
        assert path is not None
        assert path.origin is not None
        source = Path(path.origin).read_text()
        assert source.lstrip().startswith('"""'), f"{name} has no header"
        assert len(source.splitlines()) <= 400, f"{name} is too long to be read"


def _imported(statement: str) -> set[str]:
    """Modules of the HEAVY list that a statement brings into a fresh interpreter."""
    script = f"import sys\n{statement}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60, cwd="/"
    )
    return set(result.stdout.split())


def test_the_client_brings_nothing_heavy_into_a_trainer() -> None:
    assert _imported("import verl_shipper_client") == set()


def test_a_client_at_work_brings_nothing_heavy_either(tmp_path: Path) -> None:
    work = f"""
from verl_shipper_client import Client
with Client("p", "e", config={{"a": 1}}, spool_dir={str(tmp_path)!r}) as client:
    client.log({{"a": 1, "odd": object()}}, step=1)
    client.log_generations([("q", "a", 1)], step=1)
    with client.span("s"):
        pass
"""
    assert _imported(work) == set()


def test_the_command_line_starts_without_the_trackers() -> None:
    assert _imported("import verl_shipper.cli") == {"click"}
    assert not _imported("import verl_shipper.daemon, verl_shipper.serve") & {
        "wandb",
        "mlflow",
        "swanlab",
        "trackio",
        "torch",
        "numpy",
    }
