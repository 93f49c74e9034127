"""The vLLM engine: all that knows vLLM's versions and insides."""
