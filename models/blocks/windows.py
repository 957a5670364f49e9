"""Which layers see a window of the tokens before them, and what ``config.json`` says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from models.config_json import ConfigJson
from models.errors import ModelError
from models.keys import Fields, Keys

SLIDING, FULL, LINEAR, CHUNKED = "sliding_attention", "full_attention", "linear_attention", "chunked_attention"
_WINDOW, _SWITCH, _FIRST, _KINDS = "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"


@dataclass(frozen=True)
class Windows(Keys):
    """The window of each layer: tokens that a token sees, itself among them; 0: all before it.

    Attributes:
        is_listed: whether ``layer_types`` counts.
        pattern: which layers have the window where none are listed: 1 or 0 for each, repeated to the last layer.
        is_switched: ``use_sliding_window`` turns windows on, and those have one that are listed or, without a list,
            that come from ``max_window_layers`` on.
    """

    is_listed: bool = True
    pattern: str = "1"
    is_switched: bool = False
    says: ClassVar[tuple[str, ...]] = ("layers.window",)

    def read(self, config: ConfigJson) -> dict[str, Any]:
        kinds = config.layer_types() if self.is_listed else []
        has_window = [kind == SLIDING for kind in kinds] or self.unlisted(config)
        if (self.is_switched and not config.get(_SWITCH)) or config.get(_WINDOW) is None:
            if SLIDING in kinds or (self.pattern != "1" and any(has_window)):
                raise ModelError(f"config.json: some layers have {SLIDING}, and {_WINDOW} is not set or off")
            has_window = [False] * config.layer_num
        window = config.size(_WINDOW) if any(has_window) else 0
        return {self.says[0]: tuple(window if has else 0 for has in has_window)}

    def unlisted(self, config: ConfigJson) -> list[bool]:
        """Return which layers have a window where none are listed."""
        layers = range(config.layer_num)
        if self.is_switched:
            first = config.whole(_FIRST) if config.get(_SWITCH) and config.get(_WINDOW) is not None else 0
            return [layer >= first for layer in layers]
        return [self.pattern[layer % len(self.pattern)] == "1" for layer in layers]

    def write(self, fields: Fields) -> dict[str, Any]:
        windows = fields[self.says[0]]
        window = max(windows)
        if not self._lists():
            return {_WINDOW: window or None}
        said: dict[str, Any] = {_KINDS: [SLIDING if each else FULL for each in windows]}
        if window:
            said[_WINDOW] = window
        if not self.is_switched:
            return said
        first = next((layer for layer, each in enumerate(windows) if each), len(windows))
        return {**said, _SWITCH: bool(window), _FIRST: first}

    def lacks(self, fields: Fields) -> list[str]:
        sizes = set(fields[self.says[0]])
        if len(sizes) == 1 or (self._lists() and len(sizes - {0}) == 1):
            return []
        return [f"{self.says[0]}: {sorted(sizes)}  (it has one {'size' if self._lists() else 'in every layer'})"]

    def _lists(self) -> bool:
        return self.is_switched or self.pattern != "1"
