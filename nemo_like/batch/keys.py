"""The table of column names: who writes a column, and what one entry of it means.

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
TURNS = "turns"
"""int64, number within the trajectory of the completion that sampled the token; in runs with
several turns. Written by rollout."""
POLICY_LOGPROBS = "policy_logprobs"
"""float32, logprob in the trainer before the step. Written by the policy."""
REFERENCE_LOGPROBS = "reference_logprobs"
"""float32, logprob in the frozen reference model. Written by the policy."""
VALUES = "values"
"""float32, the critic's prediction, before its step, of the return from the state in which the
token was sampled: its head's output at the token before. Written by the critic."""
RETURNS = "returns"
"""float32, the return that the value of the same token should have been. Written by the
algorithm."""
TEACHER_IDS = "teacher_ids"
"""int64 [N, K], the teacher's K most likely tokens in place of this one; all of the vocabulary if K
is its size; 0 where the token does not train. Written by the teacher."""
TEACHER_LOGPROBS = "teacher_logprobs"
"""float32 [N, K], the teacher's logprobs of these, at the temperature of the student's. Written by
the teacher."""
ENTROPIES = "entropies"
"""float32, entropy in nats of the policy's distribution that the token is from, with gradient;
trained tokens only. Written by the training engine, for losses that ask for it."""

# Row columns, [B].
ADVANTAGES = "advantages"
"""float32, one for all trained tokens of a row; as a token column, one for each (GAE). Written by
the algorithm."""
REFERENCE_KL = "reference_kl"
"""float64, estimate of KL(policy || reference) over the row's tokens. Written by the policy."""
MEAN_MISMATCHES = "mean_mismatches"
"""float64, mean |policy - generation logprob| over the row's tokens. Written by the policy."""
SAMPLE_MASK = "sample_mask"
"""bool, True for rows that train. Written by rollout (failed rewards are False)."""
REWARDS = "rewards"
"""float64, NaN where the reward failed. Written by rollout."""
REWARD_OF = "reward_"
"""Begins the columns of several rewards, float64, one for each; NaN where it failed. Written by
rollout."""
STEP_REWARDS = "step_rewards"
"""float64 [B, K], reward of each of at most K completions of the row's trajectory, NaN if none was
given; they add up to the total reward. In runs with several turns. Written by rollout."""
STEP_ADVANTAGES = "step_advantages"
"""float32 [B, K], advantage of the tokens of each of these completions. Written by the algorithm.
"""
TASKS = "tasks"
"""int64, equal for rows of the same task (``Row.task``). Written by rollout."""
GROUP_IDS = "group_ids"
"""int64, number of the row's group in the run: rows of one prompt, drawn once, share it."""
NUM_LOSS_TOKENS = "num_loss_tokens"
"""int64, trained tokens of the row: the sum of its loss mask."""
PROMPTS = "prompts"
"""int64, hash of the ids before the row's first trained token."""
PROMPT_TOKENS = "prompt_tokens"
"""int64, number of these ids."""
SIBLINGS = "siblings"
"""int64, position of the trajectory in its group; rows of one trajectory share both numbers.
Written by rollout."""
TRUNCATED = "truncated"
"""bool, the completion ended for want of room."""
SEEDS = "seeds"
"""int64, sampling seed of the completion."""
WEIGHT_VERSIONS = "weight_versions"
"""int64, version of the oldest weights that sampled any of the row's trajectory."""
PART = "part"
"""int64, which entry of the mixture ``data.train`` the row is from; none without one. Written by
the data."""
MEAN_VERSIONS = "mean_versions"
"""float64, mean weight version over the sampled tokens."""
NEWEST_VERSIONS = "newest_versions"
"""int64, version of the newest weights that sampled any of the row's trained tokens."""
NUM_OLDER = "num_older"
"""int64, trained tokens of the row that older weights than those sampled; they come first."""
FRESH_FROM = "fresh_from"
"""int64, the first of the row's trained tokens that the policy's current weights sampled, or their
number. Written by runs with lag."""
