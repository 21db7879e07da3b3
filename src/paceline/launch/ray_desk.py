"""The desk: a small actor beside the driver, where ranks on Ray leave what the driver is to know.

The driver makes it and hands it to the ranks with their work. It holds no secret.
"""

from __future__ import annotations

from typing import Any


class Desk:
    """Messages for the driver, in their order, and a few values that ranks tell each other."""

    def __init__(self) -> None:
        self._told: list[tuple[str, dict[str, Any]]] = []
        self._values: dict[str, Any] = {}

    def tell(self, kind: str, content: dict[str, Any]) -> None:
        self._told.append((kind, content))

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        """Return what was told since the last call."""
        told, self._told = self._told, []
        return told

    def put(self, key: str, value: Any) -> None:
        self._values[key] = value

    def get(self, key: str) -> Any:
        """Return a value; None if it was not put there yet."""
        return self._values.get(key)
