"""Modules whose changes are counted, so that what was derived from a model is known to be outdated."""

from typing import Any

from torch import nn


class _Changes:
    """How many changes of modules there have been in this process: while it stays, no model has changed."""

    count = 0


def changed(module: nn.Module) -> None:
    """Count a change of a module."""
    _Changes.count += 1
    module.__dict__["changes"] = module.__dict__.get("changes", 0) + 1


class Version:
    """A model as it is when this is made."""

    def __init__(self, model: nn.Module):
        self._count, self._modules = _Changes.count, _changes(model)

    def is_current(self, model: nn.Module) -> bool:
        """Whether the model has not changed since."""
        if self._count != _Changes.count:
            count, modules = _Changes.count, _changes(model)
            if modules != self._modules:
                return False
            self._count = count  # what has changed is another model
        return True


def _changes(model: nn.Module) -> list[tuple]:
    return [(id(module), module.__dict__.get("changes")) for module in model.modules()]


class TrackedModule(nn.Module):
    """A module that counts assignments of its attributes, its parameters, hooks, moves and loads.

    Not noticed: what is done to its `__dict__`, to parameters in place (which needs no notice), and to `param.data`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        changed(self)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        changed(self)
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See torch."""
        changed(self)
        super().register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """See torch."""
        changed(self)
        super().add_module(name, module)

    def register_forward_hook(self, *arguments: Any, **options: Any) -> Any:
        """See torch."""
        changed(self)
        return super().register_forward_hook(*arguments, **options)

    def register_forward_pre_hook(self, *arguments: Any, **options: Any) -> Any:
        """See torch."""
        changed(self)
        return super().register_forward_pre_hook(*arguments, **options)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        changed(self)
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        changed(self)
        super()._load_from_state_dict(*arguments, **options)


class TrackedList(TrackedModule, nn.ModuleList):
    """A list of modules that counts changes of itself."""
