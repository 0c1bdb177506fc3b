"""Configuration: typed, split into what must agree and what may differ, checked whole before anything starts."""

from emberkv.config.cluster import ClusterConfig, NamespaceConfig, state_home
from emberkv.config.load import dump, load, parse_size, write
from emberkv.config.node import NodeConfig

__all__ = ["ClusterConfig", "NamespaceConfig", "NodeConfig", "dump", "load", "parse_size", "state_home", "write"]
