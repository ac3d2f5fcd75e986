"""Copies of what other nodes keep.

They lie in the fastest tier for as long as nothing else wants their place: they displace nothing but each other, go before
everything else, and are neither moved to another tier nor saved at a stop. Whoever wants them again gets them from their
owner. Which they are is remembered here and not in the index: after a restart, what is left of them is like anything else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from cachefs.store.index import CopyKey

LOOKED_AT = 64
"""Copies that one search passes over because they are in use. Guessed; they come last in the next one."""


SPENT = 65_536
"""Spent copies that are remembered of a tier, about 200 bytes each. Guessed: many more than go before the next are spent."""


class Copies:
    """Keys of copies by tier, used longest ago first."""

    def __init__(self) -> None:
        self._tiers: dict[int, OrderedDict[CopyKey, None]] = {}

    def __contains__(self, key: CopyKey) -> bool:
        return key in self._tiers.get(key[0], ())

    def add(self, key: CopyKey) -> None:
        self._tiers.setdefault(key[0], OrderedDict())[key] = None

    def discard(self, key: CopyKey) -> bool:
        """It is gone, or is none of them any more. Whether it was."""
        keys = self._tiers.get(key[0])
        if keys is None or key not in keys:
            return False
        del keys[key]
        return True

    def used(self, key: CopyKey) -> None:
        """Those used again stay longer."""
        keys = self._tiers.get(key[0])
        if keys is not None and key in keys:
            keys.move_to_end(key)

    def forget_tier(self, tier: int) -> None:
        self._tiers.pop(tier, None)

    def oldest(self, tier: int) -> Iterator[CopyKey]:
        """Some of a tier, in the order in which they go. What is passed over is looked at last in the next search."""
        for key in list(islice(self._tiers.get(tier, ()), LOOKED_AT)):
            yield key
            self.used(key)


class Borrowed(Copies):
    """What other nodes keep."""


class Spent(Copies):
    """What all nodes have had in this epoch (`askers.py`): not wanted before the next, however lately used."""

    def add(self, key: CopyKey) -> None:
        if len(self._tiers.get(key[0], ())) < SPENT:
            super().add(key)

    def moved(self, source: CopyKey, target: CopyKey) -> None:
        """The one is a copy of the other."""
        if source in self:
            self.add(target)

    def clear(self) -> None:
        self._tiers.clear()
