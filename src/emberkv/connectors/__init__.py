"""What stands between an inference engine and the EmberKV client: connectors translate, they never decide.

Why it exists: an engine has tokens and tensors, the cache has keys and bytes; one file per engine maps the one onto the
    other.
Laws: an engine process loads the client, `types` and its own connector only; no connector imports another. `keys` and
    `saver` are the shared parts (pure keys, background saving) that any of them may use; neither imports an engine.
Limits: importing this package imports no engine; `emberkv.connectors.transformers` and `.smollm2` need the
    `transformers` extra.
"""

from emberkv.connectors.keys import Fingerprint, Geometry, chain_keys

__all__ = ["Fingerprint", "Geometry", "chain_keys"]
