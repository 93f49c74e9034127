"""The vLLM engine: everything that depends on vLLM's versions and internals."""
