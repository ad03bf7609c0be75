"""The grid of ranks: rows and columns of cells, and in each cell `ulysses` consecutive ranks that divide the heads.

Attention2D (section 3.2) has one rank per cell. Cells of several ranks are this library's extension: they divide the heads
as DeepSpeed-Ulysses does (docs/concepts/attention-on-a-grid.md).
"""

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from commfabric.collectives.agreement import check_member


def group_size(group: ProcessGroup | None) -> int:
    """The number of ranks in a process group; None stands for one rank. Raises ValueError if this rank is no member."""
    check_member(group)
    return 1 if group is None else group.size()


@dataclass(frozen=True)
class Grid:
    """The grid as one rank sees it.

    Rank u + ulysses * (i + rows * j) of the group is member u of the cell in row i and column j. Cells are numbered
    i + rows * j. While attention is computed, all ranks of a cell hold the same tokens, each with its own share of the
    heads. Queries travel along a row of cells, keys and values along a column, always between ranks with the same `member`.
    """

    rank: int
    ulysses: int
    rows: int
    cols: int

    @property
    def ranks(self) -> int:
        return self.ulysses * self.rows * self.cols

    @property
    def cells(self) -> int:
        return self.rows * self.cols

    @property
    def member(self) -> int:
        """This rank's index within its cell, from 0 to ulysses - 1: which share of the heads it computes."""
        return self.rank % self.ulysses

    @property
    def cell(self) -> int:
        return self.rank // self.ulysses

    @property
    def row(self) -> int:
        return self.cell % self.rows

    @property
    def col(self) -> int:
        return self.cell // self.rows

    def rank_at(self, row: int, col: int) -> int:
        """The rank with this rank's `member` index in the cell at (row, col)."""
        return self.rank_in_cell(row + self.rows * col)

    def rank_in_cell(self, cell: int) -> int:
        """The rank with this rank's `member` index in cell number `cell`."""
        return self.member + self.ulysses * cell

    def cell_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.cell * self.ulysses, (self.cell + 1) * self.ulysses))
