"""Bring generation to the policy's weights and, where both share GPUs, hand each GPU over.

The order keeps the peak low. To generation: the policy gives back what its last step only cached
(its optimizer state is on the host already with ``policy.offload``), engines take memory for
weights, weights move bucket by bucket, the policy gives back the buckets, engines take memory for
their KV cache. To the policy: engines drop both. vLLM's CUDA graphs stay, as they hold addresses,
which the same memory gets again. Dropped weights are gone, so that a refit follows every sleep.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from nemo_like.config.generation import RefitConfig, Transport
from nemo_like.distributed.worker_group import wait_together
from nemo_like.generation.protocol import EngineConfig, EngineMemory, Link
from nemo_like.generation.worker import Generation
from nemo_like.observe.metrics import Metric, Metrics, Reduce
from nemo_like.planning.resources import ResourcePlan, refit_transport
from nemo_like.refit.buckets import numbered, total_bytes
from nemo_like.refit.ipc import IpcLink

if TYPE_CHECKING:
    from nemo_like.policy.remote_model import RemoteModel
    from nemo_like.policy.worker import SenderAddress

logger = logging.getLogger(__name__)

_BUCKET_BYTES = 512 << 20
"""Of a bucket at most, unless one tensor is larger. A sender holds three: two on their way and one
that is gathered."""


class WeightSync:
    """Moves weights by version, and hands over shared GPUs."""

    def __init__(
        self,
        config: RefitConfig,
        policy: "RemoteModel",
        generation: Generation[Any],
        plan: ResourcePlan,
        engine: EngineConfig,
    ) -> None:
        """Connect both sides; ``engine`` is what each replica was started with."""
        self._policy = policy
        self._generation = generation
        self._sleep = engine.sleep
        self._adapters_apart = engine.lora is not None
        transport = refit_transport(config, plan)
        opened = policy.submit_senders(receivers(transport, plan), transport, _BUCKET_BYTES)
        senders = wait_together(opened)[0]
        links = links_to(transport, plan, senders, policy.group.contexts[0].meeting_address)
        buckets = senders[0].buckets
        self._num_bytes = total_bytes(buckets)
        alone = numbered(buckets, adapters_only=True)
        self._adapter_bytes = total_bytes([bucket for _, bucket in alone])
        wait_together(
            policy.submit_accept(),
            generation.submit_connect(links, buckets),
        )
        logger.info(
            "Refits: %s, %d bucket(s), %.2f GB.", transport, len(buckets), self._num_bytes / 1e9
        )

    @property
    def is_due(self) -> bool:
        """Whether generation is behind, or has given its memory away."""
        return self._generation.weight_version != self._policy.weight_version

    def give_to_generation(self) -> Metrics:
        """Wake generation and refit it; afterwards it may sample."""
        policy, generation = self._policy, self._generation
        # No version: never refitted, asleep since then (which drops the model too), or failed.
        adapters_only = self._adapters_apart and generation.weight_version is not None
        if self._sleep:
            policy.release_memory()
            generation.wake(EngineMemory.weights)
        sent, loaded = wait_together(
            policy.submit_weights(adapters_only=adapters_only),
            generation.submit_load(policy.weight_version, adapters_only=adapters_only),
        )
        generation.weight_version = policy.weight_version
        if self._sleep:
            policy.release_memory()
            generation.wake(EngineMemory.kv_cache)
        return {
            "refit/bytes": Metric(
                self._adapter_bytes if adapters_only else self._num_bytes, reduce=Reduce.max
            ),
            "time/refit_send_s": Metric(max(sent), reduce=Reduce.max),
            "time/refit_load_s": Metric(max(loaded), reduce=Reduce.max),
        }

    def give_to_policy(self) -> None:
        """Free what generation holds of shared GPUs."""
        if self._sleep:
            self._generation.sleep()


def receivers(transport: Transport, plan: ResourcePlan) -> tuple[int, ...]:
    """Engine ranks that each policy rank sends to."""
    if transport == "broadcast":
        everyone = sum(len(replica) for replica in set(plan.generation))
        return (everyone,) + (0,) * (len(plan.policy) - 1)
    engine_ranks = Counter(bundle for replica in plan.generation for bundle in replica)
    return tuple(engine_ranks[bundle] for bundle in plan.policy)


def links_to(
    transport: Transport, plan: ResourcePlan, senders: "Sequence[SenderAddress]", host: str
) -> Sequence[Link]:
    """How each replica reaches its sender or senders."""
    if transport == "ipc":
        of_bundle = {
            bundle: sender.ipc
            for bundle, sender in zip(plan.policy, senders, strict=True)
            if sender.ipc is not None
        }
        return [IpcLink(tuple(of_bundle[bundle] for bundle in one)) for one in plan.generation]
    from nemo_like.refit.broadcast import BroadcastLink
    from nemo_like.refit.relay import links_of_gpu

    links: list[Link] = []
    next_rank, world_size = 1, 1 + sum(map(len, set(plan.generation)))
    for bundles, replicas in groupby(plan.generation):
        link = BroadcastLink(host, senders[0].port, next_rank, world_size)
        links += links_of_gpu(link, len(list(replicas)))
        next_rank += len(bundles)
    return links
