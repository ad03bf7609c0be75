"""Ranks as a grid: `ulysses` neighbours that share heads are a cell, and cells stand in rows x cols (attention2d.md A.1)."""

from dataclasses import dataclass


def size_of(group) -> int:
    """Ranks of a process group; None is one rank."""
    return 1 if group is None else group.size()


@dataclass(frozen=True)
class Grid:
    """One rank's place: rank u + ulysses (i + rows j) of its group is place u of cell (i, j), the cell i + rows j.

    A cell's ranks hold the same tokens, each with its share of the heads; queries travel along a row of cells, keys and
    values along a column, each between ranks of the same place.
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
    def place(self) -> int:
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

    def at(self, row: int, col: int) -> int:
        """The rank of the same place in another cell."""
        return self.in_cell(row + self.rows * col)

    def in_cell(self, cell: int) -> int:
        """The rank of the same place in a cell given by its number."""
        return self.place + self.ulysses * cell

    def mates(self) -> tuple[int, ...]:
        """The ranks of this cell."""
        return tuple(range(self.cell * self.ulysses, (self.cell + 1) * self.ulysses))
