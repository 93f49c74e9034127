"""The typed configuration: its schema, how it is loaded, and the checks made before Ray starts.

Nothing in this package imports torch, ray, vllm or transformers, so a wrong key is refused in
well under two seconds.
"""
