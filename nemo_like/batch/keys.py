"""THE table of column names: who writes a column, and what one entry of it means.

Legend: ``B`` rows (sequences), ``N`` tokens of all rows end to end. Token column entry ``t`` always
speaks of the token at ``t`` itself, never of the one it predicts.
"""

# Token columns, [N].
INPUT_IDS = "input_ids"
"""int64, prompt and completion as they were sampled. Written by rollout."""
LOSS_MASK = "loss_mask"
"""bool, True where the policy sampled the token. Written by rollout."""
GENERATION_LOGPROBS = "generation_logprobs"
"""float32, logprob in the engine that sampled; 0 where the mask is False. Written by rollout."""
POLICY_LOGPROBS = "policy_logprobs"
"""float32, logprob in the trainer before the step. Written by the policy."""
REFERENCE_LOGPROBS = "reference_logprobs"
"""float32, logprob in the frozen reference model. Written by the policy."""

# Row columns, [B].
ADVANTAGES = "advantages"
"""float32, one for all trained tokens of a row. Written by the algorithm."""
SAMPLE_MASK = "sample_mask"
"""bool, True for rows that train. Written by rollout (failed rewards are False)."""
REWARDS = "rewards"
"""float64, NaN where grading failed. Written by rollout."""
PROMPT_IDS = "prompt_ids"
"""int64, position of the row's prompt in the step: rows of one group share it."""
NUM_LOSS_TOKENS = "num_loss_tokens"
"""int64, trained tokens of the row: the sum of its loss mask."""
TRUNCATED = "truncated"
"""bool, the completion ended for want of room."""
SEEDS = "seeds"
"""int64, sampling seed of the completion."""
WEIGHT_VERSIONS = "weight_versions"
"""int64, version of the weights that sampled the completion."""
