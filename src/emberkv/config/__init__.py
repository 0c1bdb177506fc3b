"""Configuration: typed, split into what must agree and what may differ, checked whole before anything starts."""

from emberkv.config.cluster import ClusterConfig, state_home
from emberkv.config.load import dump, load, parse_size, write
from emberkv.config.namespace import NamespaceConfig, check_namespace, policy_document
from emberkv.config.node import NodeConfig

__all__ = [
    "ClusterConfig",
    "NamespaceConfig",
    "NodeConfig",
    "check_namespace",
    "dump",
    "load",
    "parse_size",
    "policy_document",
    "state_home",
    "write",
]
