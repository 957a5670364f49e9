"""Conversations that a client may continue by an answer's id: in memory, bounded, for a while."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from typing import Any

_MOST, _MOST_BYTES, _KEPT_S = 1024, 64 << 20, 3600.0


class StoredConversations:
    """Messages by the id of the answer that they end with; the oldest go first, and each after an hour."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._size_bytes = 0

    def keep(self, identity: str, messages: list[dict[str, Any]]) -> None:
        """Keep a conversation."""
        written = json.dumps(messages).encode()
        _, replaced = self._by_id.pop(identity, (0.0, b""))
        self._size_bytes -= len(replaced)
        self._by_id[identity] = time.monotonic() + _KEPT_S, written
        self._size_bytes += len(written)
        self._drop()

    def find(self, identity: str) -> list[dict[str, Any]] | None:
        """Return a conversation; None: it is not kept, or no more."""
        self._drop()
        found = self._by_id.get(identity)
        return None if found is None else list(json.loads(found[1]))

    def _drop(self) -> None:
        now = time.monotonic()
        while self._by_id:
            until, written = next(iter(self._by_id.values()))
            if len(self._by_id) <= _MOST and self._size_bytes <= _MOST_BYTES and until > now:
                return
            self._by_id.popitem(last=False)
            self._size_bytes -= len(written)
