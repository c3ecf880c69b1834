"""Which pages of the KV cache are free, and what the others hold; kept on the host.

A full page's keys and values depend on its tokens and on all tokens before it, so a page is known by the hash of both:
rows whose texts begin alike share pages by reference. A row only writes past what it shares. Pages that no row holds
any more stay known until they are needed for something else.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np


def page_keys(caller: str, tokens: Sequence[int], page_tokens: int) -> list[bytes]:
    """What each full page of a text is known by, in order. Texts of different callers never share a page."""
    key, keys = hashlib.sha256(caller.encode()).digest(), []
    whole = len(tokens) // page_tokens * page_tokens
    for page in np.asarray(tokens[:whole], np.int32).reshape(-1, page_tokens):
        key = hashlib.sha256(key + page.tobytes()).digest()
        keys.append(key)
    return keys


class Pages:
    """The pages of each group of devices that hold the same rows (a coordinate of data x fsdp).

    A page is named by its index in its own group's part of the pool.
    """

    def __init__(self, groups: int, per_group: int):
        self.per_group = per_group
        self._unused = [list(range(per_group - 1, -1, -1)) for _ in range(groups)]
        self._rows: list[Counter[int]] = [Counter() for _ in range(groups)]
        """Rows that hold each page."""
        self._known: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self._keys: list[dict[int, bytes]] = [{} for _ in range(groups)]
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(groups)]
        """Known pages that no row holds, the one given back longest ago first."""

    def free(self, group: int) -> int:
        """Pages that no row holds."""
        return len(self._unused[group]) + len(self._idle[group])

    def find(self, group: int, keys: Sequence[bytes]) -> list[int]:
        """The known pages that a text with these keys begins with."""
        found: list[int] = []
        for key in keys:
            if key not in self._known[group]:
                break
            found.append(self._known[group][key])
        return found

    def fits(self, group: int, shared: Sequence[int], count: int) -> bool:
        """Whether a row can have `count` pages, `shared` among them."""
        idle = sum(page in self._idle[group] for page in shared)
        return self.free(group) - idle >= count - len(shared)

    def share(self, group: int, pages: Sequence[int]) -> None:
        """One more row holds these pages."""
        for page in pages:
            self._rows[group][page] += 1
            self._idle[group].pop(page, None)

    def take(self, group: int, count: int) -> list[int]:
        """`count` pages for a row to write."""
        assert count <= self.free(group), "admitted without free pages"
        taken: list[int] = []
        for _ in range(count):
            if self._unused[group]:
                page = self._unused[group].pop()
            else:
                page, _ = self._idle[group].popitem(last=False)
                del self._known[group][self._keys[group].pop(page)]
            self._rows[group][page] = 1
            taken.append(page)
        return taken

    def remember(self, group: int, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """These full pages hold what `keys` say; where another page does already, that one stays known."""
        for key, page in zip(keys, pages, strict=True):
            if key not in self._known[group] and page not in self._keys[group]:
                self._known[group][key], self._keys[group][page] = page, key

    def give_back(self, group: int, pages: Sequence[int]) -> None:
        """The pages of a row that has ended. A text's last page is forgotten before those before it."""
        for page in reversed(pages):
            self._rows[group][page] -= 1
            if self._rows[group][page]:
                continue
            del self._rows[group][page]
            if page in self._keys[group]:
                self._idle[group][page] = None
            else:
                self._unused[group].append(page)
