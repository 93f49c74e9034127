"""Pure functions of logprobs and batch: float32, no collectives, one global denominator."""
