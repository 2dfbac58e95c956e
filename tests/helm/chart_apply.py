"""Server-side apply of one object, as an API server does it: who owns which field, what conflicts, and what goes when nobody owns it.

https://kubernetes.io/docs/reference/using-api/server-side-apply/: elements of a list are told apart by the keys of its schema.
"""

from __future__ import annotations

from typing import Any

from chart_render import Object
from chart_schemas import FieldPath, leaves

REPLICAS: FieldPath = ("spec", "replicas")


class Conflict(Exception):
    """Fields that other managers own, with other values."""


class Applied:
    """An object of the cluster. `fields`: its values by path."""

    def __init__(self) -> None:
        self.fields: dict[FieldPath, Any] = {}
        self._owned: dict[str, set[FieldPath]] = {}

    def apply(self, manager: str, object: Object, *, force: bool = False) -> None:
        """`kubectl apply --server-side --field-manager`; `force`: --force-conflicts. Raises Conflict, and then changes nothing."""
        new = leaves(object)
        conflicts = {path for path in new if self.fields.get(path, new[path]) != new[path] and self._owners(path) - {manager}}
        if conflicts and not force:
            raise Conflict(sorted(map(str, conflicts)))
        for owned in self._owned.values():
            owned -= conflicts
        dropped = self._owned.get(manager, set()) - new.keys()
        self._owned[manager] = set(new)
        for path in dropped:
            if not self._owners(path):
                del self.fields[path]
        self.fields.update(new)

    def update(self, manager: str, path: FieldPath, value: Any) -> None:
        """Updates a field as an HPA or `kubectl scale` does: its manager owns the field from then on."""
        if self.fields.get(path) != value:
            for owned in self._owned.values():
                owned.discard(path)
            self._owned.setdefault(manager, set()).add(path)
            self.fields[path] = value

    @property
    def pods(self) -> int:
        """The number of pods; Kubernetes takes 1 where none is said."""
        number: int = self.fields.get(REPLICAS, 1)
        return number

    def _owners(self, path: FieldPath) -> set[str]:
        return {manager for manager, owned in self._owned.items() if path in owned}
