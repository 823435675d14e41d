"""Modules of somebody else are changed when they are imported, once, and never broken."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_shipper_client.verl import patch
from verl_shipper_client.verl.patch import safely, tell_once, when_imported, wrap


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with two modules, importable, and gone afterwards."""
    name = "changed_by_somebody"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "heavy.py").write_text("VALUE = 1\n\nclass Thing:\n    def f(self):\n        return 1\n")
    (tmp_path / name / "user.py").write_text(f"from {name}.heavy import Thing, VALUE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(patch, "_acts", {})
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, patch._Finder)])
    yield name
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def test_a_module_is_changed_behind_its_own_code_and_before_its_users(package: str) -> None:
    when_imported(f"{package}.heavy", lambda module: setattr(module, "VALUE", 2))
    assert f"{package}.heavy" not in sys.modules
    assert importlib.import_module(f"{package}.user").VALUE == 2


def test_a_module_that_is_there_is_changed_at_once(package: str) -> None:
    heavy = importlib.import_module(f"{package}.heavy")
    when_imported(f"{package}.heavy", lambda module: setattr(module, "VALUE", 2))
    assert heavy.VALUE == 2


def test_a_changed_module_keeps_its_own_loader_and_source(package: str) -> None:
    when_imported(f"{package}.heavy", lambda module: None)
    heavy = importlib.import_module(f"{package}.heavy")
    assert not isinstance(heavy.__spec__.loader, patch._Loader)  # type: ignore[union-attr]
    assert "VALUE = 1" in heavy.__loader__.get_source(heavy.__name__)  # type: ignore[union-attr]


def test_a_module_may_be_looked_for_without_being_imported(package: str) -> None:
    when_imported(f"{package}.heavy", lambda module: None)
    spec = importlib.util.find_spec(f"{package}.heavy")
    assert spec is not None
    assert spec.origin is not None
    assert spec.origin.endswith("heavy.py")
    assert importlib.util.find_spec(f"{package}.missing") is None


def test_a_change_that_fails_costs_only_itself(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    when_imported(f"{package}.heavy", lambda module: done.append(module.no_such_thing))
    when_imported(f"{package}.heavy", lambda module: done.append("second"))
    assert importlib.import_module(f"{package}.heavy").VALUE == 1
    assert done == ["second"]
    assert "no_such_thing" in capsys.readouterr().err


def test_a_module_that_raises_raises_what_it_would_have(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "broken.py").write_text("raise LookupError('theirs')\n")
    when_imported(f"{package}.broken", lambda module: None)
    with pytest.raises(LookupError, match="theirs"):
        importlib.import_module(f"{package}.broken")


def test_wrapping_twice_is_wrapping_once() -> None:
    owner = types.SimpleNamespace(f=lambda: 1)
    for _ in range(2):
        wrap(owner, "f", lambda original: lambda: original() + 1)
    assert owner.f() == 2
    assert not wrap(owner, "g", lambda original: original)


def test_only_what_a_class_itself_has_is_wrapped() -> None:
    class Base:
        def f(self) -> int:
            return 1

    class Derived(Base):
        pass

    assert not wrap(Derived, "f", lambda original: original)


def test_one_trouble_is_told_once_and_many_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        tell_once("the same")
    for number in range(100):
        tell_once(f"trouble {number}")
    assert len(capsys.readouterr().err.splitlines()) == patch._TOLD_MAX
    monkeypatch.setattr(sys, "stderr", None)
    tell_once("to nobody")


def test_what_is_not_an_ordinary_error_is_not_ours_to_stop() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        safely(stop)


def test_a_module_that_is_loaded_again_is_changed_again(package: str) -> None:
    when_imported(f"{package}.heavy", lambda module: setattr(module, "VALUE", 2))
    heavy = importlib.import_module(f"{package}.heavy")
    assert importlib.reload(heavy).VALUE == 2


def test_a_stderr_of_any_kind_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Evil:
        def write(self, _text: str) -> None:
            raise RuntimeError("no")

    monkeypatch.setattr(sys, "stderr", Evil())
    tell_once("something")


def test_what_is_no_function_is_left_alone() -> None:
    owner = types.SimpleNamespace(f=functools.partial(int, "7"))
    assert not wrap(owner, "f", lambda original: None)
    assert owner.f() == 7
