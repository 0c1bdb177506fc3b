"""Coordinators: the one truth about who is alive and who owns what (design 4), behind `ports.Coordinator`."""

from emberkv.coord.sqlite import SqliteCoordinator, StrongStore

__all__ = ["SqliteCoordinator", "StrongStore"]
