"""Conversations of a real engine with real environments, and their logprobs by the trainer."""

import asyncio

from nemo_like.batch import keys
from nemo_like.config.environment import SINGLE_TURN, EnvironmentConfig
from nemo_like.data.datasets import Row
from nemo_like.environments.protocol import ENDPOINT
from nemo_like.generation.protocol import GenerationRequest
from nemo_like.policy import scoring
from nemo_like.rewards.start import start_pool
from nemo_like.rollout.endpoint import Endpoint
from nemo_like.rollout.recorder import Recorder
from nemo_like.rollout.trajectory import RolloutTask, collate_tokens, single_turn
from tests.engine_cases import make_trainer
from tests.key_steps import alone


async def converse(engine, chat, records, sampling, limits, **environment):
    """One trajectory of each record, ``{"prompt": ..., ...}``, all at once."""
    pool = await asyncio.to_thread(start_pool, EnvironmentConfig(**environment))
    endpoint = Endpoint("policy")
    await endpoint.start()

    async def one(index, record):
        fields = dict(record)
        messages = ({"role": "user", "content": fields.pop("prompt")},)
        row = Row(
            index=index, messages=messages, fields=fields, prompt_ids=tuple(chat.render(messages))
        )
        task = RolloutTask(row=row, group=index, index=0, seed=index, request_id=f"t{index}")
        fields |= {"messages": list(messages)}
        if environment.get("name", SINGLE_TURN) == SINGLE_TURN:
            prompt_ids = list(row.prompt_ids)
            completion = await engine.generate(
                GenerationRequest(
                    request_id=task.request_id,
                    prompt_ids=prompt_ids,
                    sampling=sampling,
                    seed=index,
                )
            )
            text = chat.decode(completion.token_ids)
            result = await pool.score(row.prompt, text, fields)
            return single_turn(task, completion, text, result)
        recorder = Recorder(task, engine.generate, chat, sampling, limits)
        with endpoint.serving(recorder) as address:
            fields |= {ENDPOINT: list(address)}
            result = await pool.score(row.prompt, "", fields)
        return recorder.trajectory(result)

    try:
        return await asyncio.gather(*(one(i, record) for i, record in enumerate(records)))
    finally:
        await endpoint.close()
        await asyncio.to_thread(pool.shutdown)


def largest_gap(model_path, trajectories, temperature):
    """Largest difference of an engine's logprob from the trainer's; and how many train."""
    batch = collate_tokens(trajectories)
    with alone():
        trainer = make_trainer(model_path, {"micro_batch_tokens": 2**16})
        [found] = scoring.logprobs(trainer, [batch], temperature)["policy"]
    mask = batch.tokens[keys.LOSS_MASK]
    gap = (found - batch.tokens[keys.GENERATION_LOGPROBS])[mask].abs().max().item()
    return gap, int(mask.sum())
