"""Named axes over the ranks of a worker group."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RankLayout:
    """A grid of ranks; the last axis varies fastest, so its ranks are physical neighbours.

    >>> layout = RankLayout({"dp": 2, "tp": 2})
    >>> layout.coordinate(2, "dp"), layout.output_ranks("dp")
    (1, (0, 2))
    >>> RankLayout({"pp": 2, "dp": 2}).output_ranks("dp", last="pp")
    (2, 3)
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

    def output_ranks(self, axis: str, last: str | None = None) -> tuple[int, ...]:
        """The rank at each position of ``axis`` that is first along every other (last on ``last``).

        The last stage of a pipeline has the results.
        """
        wanted = {name: 0 for name in self.sizes if name != axis}
        if last is not None:
            wanted[last] = self.sizes[last] - 1
        return tuple(
            rank
            for rank in range(self.world_size)
            if all(self.coordinate(rank, name) == at for name, at in wanted.items())
        )
