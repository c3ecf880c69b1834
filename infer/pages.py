"""Which pages of the KV cache are free, kept on the host."""

from collections.abc import Sequence


class Pages:
    """Free pages of each group of devices that hold the same rows (a coordinate of data x fsdp).

    A page is named by its index in its own group's part of the pool.
    """

    def __init__(self, groups: int, per_group: int):
        self.per_group = per_group
        self._free = [list(range(per_group - 1, -1, -1)) for _ in range(groups)]

    def free(self, group: int) -> int:
        """Pages that nobody holds."""
        return len(self._free[group])

    def take(self, group: int, count: int) -> list[int]:
        """`count` pages for a row."""
        assert count <= self.free(group), "admitted without free pages"
        return [self._free[group].pop() for _ in range(count)]

    def give_back(self, group: int, pages: Sequence[int]) -> None:
        """The pages of a row that has ended."""
        self._free[group].extend(reversed(pages))
