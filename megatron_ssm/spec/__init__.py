"""The description of a model before any tensor exists: parameters, units and layers as data, from a config.json.

In: the fields of a config.json, as read by a family. Out: a `Stack`, from which models, checkpoints and sizes are made.
"""

from commfabric.foundation.lazy import lazy_exports

_HOME = {
    "Field": ".fields",
    "packed": ".fields",
    "row_parallel": ".fields",
    "Family": ".reader",
    "FieldReader": ".reader",
    "Sizes": ".sizes",
    "Workload": ".sizes",
    "Norm": ".stack",
    "Part": ".stack",
    "Side": ".stack",
    "Spec": ".stack",
    "Stack": ".stack",
    "Unit": ".stack",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOME)
