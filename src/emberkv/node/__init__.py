"""One node: the runtime around the core, the edges that serve connections, and the composition root."""
