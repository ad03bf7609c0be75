"""Modules whose changes are counted, so that what was derived from a model is known to be outdated."""

from typing import Any

from torch import nn


class _Generation:
    """The count. It is one for the process: a change of any model outdates what was derived from every model."""

    value = 0


def generation() -> int:
    """How many changes there have been."""
    return _Generation.value


def changed() -> None:
    """Count a change."""
    _Generation.value += 1


class TrackedModule(nn.Module):
    """A module that counts assignments of its attributes, its parameters, hooks, moves and loads.

    Not noticed: what is done to its `__dict__`, to parameters in place (which needs no notice), and to `param.data`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        changed()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        changed()
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See torch."""
        changed()
        super().register_parameter(name, param)

    def register_module(self, name: str, module: nn.Module | None) -> None:
        """See torch."""
        changed()
        super().register_module(name, module)

    def register_forward_hook(self, *arguments: Any, **options: Any) -> Any:
        """See torch."""
        changed()
        return super().register_forward_hook(*arguments, **options)

    def register_forward_pre_hook(self, *arguments: Any, **options: Any) -> Any:
        """See torch."""
        changed()
        return super().register_forward_pre_hook(*arguments, **options)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        changed()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        changed()
        super()._load_from_state_dict(*arguments, **options)
