"""Draw the diagrams, and the charts of the published tables: `python docs/figures/draw.py`. Needs matplotlib."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import attention  # noqa: E402
import gradients  # noqa: E402
import models  # noqa: E402
import overview  # noqa: E402
import terminal  # noqa: E402

from benchmarks.support import charts, table_charts  # noqa: E402

FIGURES = (
    overview.overview,
    models.splitting_an_ssm,
    models.all_reduce_count,
    models.passing_states,
    models.unit,
    attention.attention_on_a_grid,
    gradients.selective_sparsification,
    terminal.terminal,
)

if __name__ == "__main__":
    for draw in FIGURES:
        path = draw()
        print(f"{path.relative_to(HERE.parents[1])}  {path.stat().st_size / 1024:.1f} KB")
    charts.save("grid_traffic", attention.grid_traffic)
    table_charts.draw()
