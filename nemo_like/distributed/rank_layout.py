"""Named axes over the ranks of a worker group."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RankLayout:
    """A grid of ranks; the last axis varies fastest, so its ranks are physical neighbours.

    >>> layout = RankLayout({"dp": 2, "tp": 2})
    >>> layout.coordinate(2, "dp"), layout.leaders("dp")
    (1, (0, 2))
    """

    sizes: dict[str, int]

    @property
    def world_size(self) -> int:
        """Ranks in the grid."""
        return math.prod(self.sizes.values())

    def coordinate(self, rank: int, axis: str) -> int:
        """Position of ``rank`` along ``axis``."""
        names = list(self.sizes)
        stride = math.prod(self.sizes[name] for name in names[names.index(axis) + 1 :])
        return rank // stride % self.sizes[axis]

    def leaders(self, axis: str) -> tuple[int, ...]:
        """The rank at each position of ``axis`` that is first along every other axis."""
        others = [name for name in self.sizes if name != axis]
        return tuple(
            rank
            for rank in range(self.world_size)
            if all(self.coordinate(rank, name) == 0 for name in others)
        )
