"""Changing modules of somebody else, in place, when they are imported and not before.

    when_imported(name, act)   act(module) right behind the module's own code; at once when it is there already
    wrap(owner, name, make)    owner.name becomes make(owner.name), once, however often it is asked for
    safely(act)                whatever goes wrong in our own code is told on stderr, once a kind, and goes no further

Importing a heavy module only to change it would cost every process that never needs it, so the change waits. A Ray
worker, a fork child and a second copy of the plugin all come by here: every change leaves a mark and looks for it.

Must not know: verl. On failure: the module is imported as if we were not there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from verl_shipper_client.values import error_text

Act = Callable[[ModuleType], object]
Result = TypeVar("Result")

MARK = "__verl_shipper__"
_TOLD_MAX = 20  # different troubles of one process that are told

_acts: dict[str, list[Act]] = {}
_told: set[str] = set()


def when_imported(name: str, act: Act) -> None:
    """Call `act` with the module `name` as soon as it is imported."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        safely(lambda: act(module))
    _acts.setdefault(name, []).append(act)  # also for a module that is loaded again
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
    """Replace what `owner` itself has under `name`; False when it has none, or one that was replaced before."""
    found = vars(owner).get(name)
    if not isinstance(found, (FunctionType, classmethod)) or hasattr(found, MARK):
        return False  # a partial method, a callable object: whatever it does, we would do it wrong
    made = make(found)
    setattr(made, MARK, True)
    setattr(owner, name, made)
    return True


def safely(act: Callable[[], Result]) -> Result | None:
    """Our own code in somebody else's: None when it fails."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - a fault of ours must not become one of the training
        tell_once(f"{error_text(error)}; the job goes on without it")
        return None


def tell_once(text: str) -> None:
    """A line on stderr, if this process has not told it yet."""
    if text in _told or len(_told) >= _TOLD_MAX:
        return
    _told.add(text)
    try:
        sys.stderr.write(f"verl-shipper: {text}\n")
    except Exception:  # noqa: BLE001 - closed, or an object of somebody's: nobody to tell
        return


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the others find, and puts our acts behind what they load."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _acts:
            return None
        for finder in sys.meta_path:
            look = None if isinstance(finder, _Finder) else getattr(finder, "find_spec", None)
            spec = look(fullname, path, target) if look is not None else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec  # type: ignore[no-any-return]
        return None


class _Loader(importlib.abc.Loader):
    """Another loader, and our acts behind it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module has the loader it would have had: others read source and data through it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for act in _acts.get(module.__name__, []):
            safely(lambda act=act: act(module))  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
