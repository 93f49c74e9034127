"""The schema, and the rules on its fields.

Nothing in this package imports torch, ray, vllm or transformers, so a wrong key is refused in
well under two seconds.
"""
