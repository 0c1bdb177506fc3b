"""EmberKV: a replicated cache of attention keys and values for LLM inference."""

__version__ = "0.1.0"
