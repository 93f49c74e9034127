"""Logprobs from hidden states: values, gradients, memory, and slices of the vocabulary on ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.policy.head import Head
from nemo_like.policy.inputs import InputLayout, model_inputs
from nemo_like.policy.logprobs import token_logprobs
from nemo_like.policy.model import ForwardRequest, HeadSettings, LogprobModel

TOKENS, WIDTH, VOCABULARY = 7, 8, 17
FLOAT32_BYTES = 4
HEADS = {
    "plain": {},
    "bias": {"with_bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 1.5},
    "all": {"with_bias": True, "scale": 1.75, "softcap": 2.0},
}


def leaves(with_bias=False, tokens=TOKENS, width=WIDTH, vocabulary=VOCABULARY, dtype=torch.float32):
    """Hidden states, weight, bias (or None) and token ids, the same at each call."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    hidden, weight = leaf(tokens, width), leaf(vocabulary, width)
    ids = torch.randint(vocabulary, (tokens,), generator=generator)
    return hidden, weight, leaf(vocabulary) if with_bias else None, ids


def plain(hidden, weight, bias, ids, temperature, scale=1.0, softcap=None):
    """Logprobs and entropies as the formulas have them, in float64."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logs = (logits / temperature).log_softmax(-1)
    return logs.gather(-1, ids[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def gradients_of(logprobs, *inputs, plus=0.0):
    """Of a sum in which each token has a weight of its own, some negative and one 0."""
    factors = torch.arange(len(logprobs), device=logprobs.device) - 2.0
    total = (logprobs * factors).sum() + plus
    return torch.autograd.grad(total, [x for x in inputs if x is not None])


def gradients_with_entropy(logprobs, entropies, *inputs):
    """``gradients_of`` where entropies have weights too, of both signs and one 0."""
    factors = 1.5 - torch.arange(len(logprobs), device=logprobs.device) / 2
    factors[-1:] = 0
    return gradients_of(logprobs, *inputs, plus=(entropies * factors).sum())


def assert_near(actual, expected, bound=1e-6):
    """``bound`` is relative to the largest element, or absolute where none is above 1."""
    size = max([1.0, *expected.detach().abs().flatten().tolist()])
    torch.testing.assert_close(actual.double(), expected.double(), atol=bound * size, rtol=0)


# Values and gradients


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk_tokens", [1, 3, TOKENS])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_entropies_and_gradients_are_those_of_log_softmax(kind, chunk_tokens, temperature):
    options = dict(HEADS[kind])
    hidden, weight, bias, ids = leaves(options.pop("with_bias", False))
    head = Head(weight=weight, bias=bias, **options)
    logprobs, entropy = token_logprobs(
        hidden,
        ids,
        head,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=True,
    )
    expected, expected_entropy = plain(hidden, weight, bias, ids, temperature, **options)
    assert logprobs.dtype == torch.float32
    assert_near(logprobs, expected)
    assert not entropy.requires_grad
    assert_near(entropy, expected_entropy)
    inputs = hidden, weight, bias
    pairs = zip(gradients_of(logprobs, *inputs), gradients_of(expected, *inputs), strict=True)
    for actual, wanted in pairs:
        assert_near(actual, wanted)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk_tokens", [1, 3, TOKENS])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_entropies_that_train_have_the_gradient_of_the_formula(kind, chunk_tokens, temperature):
    options = dict(HEADS[kind])
    inputs = leaves(options.pop("with_bias", False))
    *inputs, ids = inputs
    head = Head(weight=inputs[1], bias=inputs[2], **options)
    numbers = {"temperature": temperature, "chunk_tokens": chunk_tokens}
    both = token_logprobs(inputs[0], ids, head, entropy_trains=True, **numbers)
    exact = plain(*inputs, ids, temperature, **options)
    for actual, wanted in zip(both, exact, strict=True):
        assert_near(actual, wanted)
    pairs = zip(
        gradients_with_entropy(*both, *inputs), gradients_with_entropy(*exact, *inputs), strict=True
    )
    for actual, wanted in pairs:
        assert_near(actual, wanted)


def test_the_gradient_of_an_entropy_by_hand():
    # p = (0.8, 0.2): H = 0.500402, and -p (log p + H) = -0.8 * (-0.223144 + 0.500402).
    weight = torch.tensor([[math.log(4)], [0.0]], requires_grad=True)
    _, entropy = token_logprobs(
        torch.ones(1, 1),
        torch.tensor([0]),
        Head(weight=weight),
        temperature=1.0,
        chunk_tokens=1,
        entropy_trains=True,
    )
    assert entropy.item() == pytest.approx(0.500402, abs=1e-6)
    entropy.sum().backward()
    assert weight.grad.flatten().tolist() == pytest.approx([-0.221807, 0.221807], abs=1e-6)


@pytest.mark.parametrize(
    ("temperature", "expected"), [(1.0, -0.407606), (0.5, -0.142932), (2.0, -0.680270)]
)
def test_temperature_divides_the_logits(temperature, expected):
    head = Head(weight=torch.tensor([[2.0], [1.0], [0.0]]))
    logprobs, entropy = token_logprobs(
        torch.ones(1, 1), torch.tensor([0]), head, temperature=temperature, chunk_tokens=4
    )
    assert logprobs.item() == pytest.approx(expected, abs=1e-6)
    assert entropy is None


def test_equal_logits_have_the_entropy_of_a_uniform_choice():
    head = Head(weight=torch.full((5, 1), 3.0))
    _, entropy = token_logprobs(
        torch.ones(2, 1),
        torch.tensor([0, 4]),
        head,
        temperature=0.7,
        chunk_tokens=1,
        with_entropy=True,
    )
    assert entropy.tolist() == pytest.approx([math.log(5)] * 2)


def test_large_logits_stay_finite():
    weight = torch.tensor([[1e4], [1e4 - 1], [-1e4]], requires_grad=True)
    logprobs, entropy = token_logprobs(
        torch.ones(1, 1),
        torch.tensor([1]),
        Head(weight=weight),
        temperature=1.0,
        chunk_tokens=1,
        with_entropy=True,
    )
    other = 1 / (1 + math.exp(-1))  # probability of the first token
    assert logprobs.item() == pytest.approx(math.log(1 - other), rel=1e-6)
    expected = -other * math.log(other) - (1 - other) * math.log(1 - other)
    assert entropy.item() == pytest.approx(expected, rel=1e-6)
    logprobs.sum().backward()
    # The normalizer near 1e4 has steps of 2^-10, which is the relative error of probabilities.
    assert weight.grad.flatten().tolist() == pytest.approx([-other, other, 0], rel=2**-10)


def test_16_bit_factors_round_the_gradients_and_nothing_else():
    hidden, weight, _, ids = leaves(dtype=torch.bfloat16)
    numbers = {"temperature": 1.0, "chunk_tokens": 3, "entropy_trains": True}
    both = token_logprobs(hidden, ids, Head(weight=weight), **numbers)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = plain(*exact, None, ids, 1.0)
    for actual, wanted in zip(both, expected, strict=True):
        assert actual.dtype == torch.float32
        assert_near(actual, wanted)
    pairs = zip(
        gradients_with_entropy(*both, hidden, weight),
        gradients_with_entropy(*expected, *exact),
        strict=True,
    )
    for actual, wanted in pairs:
        assert actual.dtype == torch.bfloat16
        # One rounding to 8 significant bits, of a sum over chunks that was made in float32.
        torch.testing.assert_close(actual.double(), wanted, rtol=2**-8, atol=1e-6)


# Rows, gradients that are not wanted, and errors


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tokens_give_empty_logprobs_with_zero_gradients(with_entropy):
    hidden, weight, bias, ids = leaves(with_bias=True, tokens=0)
    logprobs, entropy = token_logprobs(
        hidden,
        ids,
        Head(weight=weight, bias=bias),
        temperature=1.0,
        chunk_tokens=3,
        with_entropy=with_entropy,
    )
    assert logprobs.shape == (0,)
    assert logprobs.dtype == torch.float32
    assert (entropy is not None) == with_entropy
    logprobs.sum().backward()
    assert hidden.grad.shape == hidden.shape
    assert weight.grad.eq(0).all()
    assert bias.grad.eq(0).all()


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_input_gets_no_gradient_and_the_other_keeps_its_own(frozen):
    inputs = leaves()
    hidden, weight, _, ids = inputs
    expected = gradients_of(plain(hidden, weight, None, ids, 1.0)[0], hidden, weight)
    inputs[frozen].requires_grad_(False)
    logprobs, _ = token_logprobs(hidden, ids, Head(weight=weight), temperature=1.0, chunk_tokens=3)
    (gradient,) = gradients_of(logprobs, inputs[1 - frozen])
    assert_near(gradient, expected[1 - frozen])


def test_a_token_outside_the_vocabulary_is_an_error():
    hidden, weight, _, ids = leaves()
    with pytest.raises(RuntimeError, match="out of bounds"):
        token_logprobs(
            hidden, ids + VOCABULARY, Head(weight=weight), temperature=1.0, chunk_tokens=3
        )


# Memory


class Float32Bytes(TorchDispatchMode):
    """The most bytes of float32 that operations made and that were alive at one time."""

    def __init__(self):
        super().__init__()
        self.made = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {storage_of(x)._cdata for x in tree_leaves((args, kwargs)) if is_tensor(x)}
        for x in filter(is_tensor, tree_leaves(out)):
            if x.dtype == torch.float32 and (storage := storage_of(x))._cdata not in known:
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.made = {key: pair for key, pair in self.made.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return out


def is_tensor(x):
    return isinstance(x, torch.Tensor)


def storage_of(tensor):
    return tensor.untyped_storage()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("entropy", ["none", "measured", "trains"])
@pytest.mark.parametrize("trains", [False, True])
def test_at_most_two_chunks_of_logits_exist(trains, entropy, softcap):
    tokens, vocabulary, chunk_tokens = 4096, 2048, 256
    hidden, weight, _, ids = leaves(tokens=tokens, vocabulary=vocabulary)
    head = Head(weight=weight, softcap=softcap)
    with Float32Bytes() as live, torch.set_grad_enabled(trains):
        logprobs, _ = token_logprobs(
            hidden,
            ids,
            head,
            temperature=0.9,
            chunk_tokens=chunk_tokens,
            with_entropy=entropy == "measured",
            entropy_trains=entropy == "trains",
        )
        if trains:
            logprobs.sum().backward()
    chunk = chunk_tokens * vocabulary * FLOAT32_BYTES
    gradients = (hidden.numel() + weight.numel()) * FLOAT32_BYTES
    per_token = 16 * tokens * FLOAT32_BYTES
    most = 3 if entropy == "trains" and softcap else 2
    assert chunk <= live.peak <= most * chunk + gradients + per_token
    with Float32Bytes() as live:
        (hidden @ weight.T).log_softmax(-1)
    assert live.peak == 2 * tokens * vocabulary * FLOAT32_BYTES  # so the count itself is right


def test_nothing_the_size_of_logits_is_kept_and_nothing_at_all_without_gradients():
    hidden, weight, _, ids = leaves()
    kept = []

    def keep(x):
        kept.append(tuple(x.shape))
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        with torch.no_grad():
            token_logprobs(hidden, ids, Head(weight=weight), temperature=1.0, chunk_tokens=3)
        assert kept == []
        token_logprobs(hidden, ids, Head(weight=weight), temperature=1.0, chunk_tokens=3)
    assert set(kept) == {(TOKENS, WIDTH), (VOCABULARY, WIDTH), (TOKENS,)}


# Slices of the vocabulary


@pytest.mark.parametrize("sizes", [(5, 12), (3, 13, 1)])
def test_slices_on_ranks_give_what_the_whole_vocabulary_gives(sizes, pool):
    pool.run(len(sizes), f"{__name__}:check_slices", sizes)


def check_slices(sizes):
    for tokens in (TOKENS, 1, 0):
        for options in HEADS.values():
            check_slice(dist.get_rank(), sizes, tokens, **options)


def check_slice(rank, sizes, tokens, with_bias=False, **options):
    hidden, weight, bias, ids = leaves(with_bias, tokens)
    first = sum(sizes[:rank])
    own = slice(first, first + sizes[rank])
    # Large on purpose: the ranks' maxima must differ, and by more than a rounding error.
    numbers = {"temperature": 0.2, "chunk_tokens": 3, "entropy_trains": True}
    whole, whole_entropy = token_logprobs(
        hidden, ids, Head(weight=weight, bias=bias, **options), **numbers
    )
    expected = gradients_with_entropy(whole, whole_entropy, hidden, weight, bias)
    head = Head(
        weight=weight[own],
        bias=None if bias is None else bias[own],
        first_token_id=first,
        group=dist.group.WORLD,
        **options,
    )
    logprobs, entropy = token_logprobs(hidden, ids, head, **numbers)
    assert_near(logprobs, whole)
    assert_near(entropy, whole_entropy)
    d_hidden, *d_rows = gradients_with_entropy(logprobs, entropy, hidden, weight, bias)
    assert_near(d_hidden, expected[0])
    for actual, wanted in zip(d_rows, expected[1:], strict=True):
        assert_near(actual[own], wanted[own])


# On a GPU


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", HEADS)
def test_a_gpu_gives_float32_logprobs_of_16_bit_factors(kind, dtype, compile):
    torch.compiler.reset()  # the compiler stops after a few kinds of one function
    options = dict(HEADS[kind])
    hidden, weight, bias, ids = (
        x if x is None else x.detach().cuda().requires_grad_(x.is_floating_point())
        for x in leaves(options.pop("with_bias", False), dtype=dtype)
    )
    logprobs, entropy = token_logprobs(
        hidden,
        ids,
        Head(weight=weight, bias=bias, **options),
        temperature=0.5,
        chunk_tokens=3,
        entropy_trains=True,
        compile=compile,
    )
    exact = [
        x if x is None else x.detach().double().requires_grad_() for x in (hidden, weight, bias)
    ]
    expected, expected_entropy = plain(*exact, ids, 0.5, **options)
    assert_near(logprobs, expected, 1e-5)
    assert_near(entropy, expected_entropy, 1e-5)
    actual = gradients_with_entropy(logprobs, entropy, hidden, weight, bias)
    formula = gradients_with_entropy(expected, expected_entropy, *exact)
    for got, wanted in zip(actual, formula, strict=True):
        # Gradients by the logits are rounded once, and so are their sums.
        assert_near(got, wanted, 1e-5 if dtype == torch.float32 else 2**-7)


@needs_gpu
def test_a_nearly_certain_token_keeps_its_gradient_in_16_bits():
    hidden = torch.tensor([[8.0]], dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16, device="cuda")
    ids = torch.tensor([0], device="cuda")
    logprobs, _ = token_logprobs(hidden, ids, Head(weight=weight), temperature=1.0, chunk_tokens=1)
    logprobs.sum().backward()
    # Of log sigmoid(h), which is 1 - sigmoid(8); sigmoid(8) rounded to 8 bits is 1.
    assert hidden.grad.item() == pytest.approx(1 / (1 + math.exp(8)), rel=2**-7)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_a_float32_head_has_no_copy_of_weights_that_went_before(tied):
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)).bfloat16()
    wrapped = LogprobModel(model, HeadSettings(chunk_tokens=3, float32=True))
    ids = torch.randint(0, 300, (9,))
    mask = torch.ones(9, dtype=torch.bool)
    mask[0] = False
    batch = TensorBatch(
        lengths=torch.tensor([9]), tokens={keys.INPUT_IDS: ids, keys.LOSS_MASK: mask}
    )
    inputs = model_inputs(batch, InputLayout(batching="padded"))
    head = model.get_output_embeddings().weight
    for _ in range(3):
        hidden = model.model(input_ids=ids[None]).last_hidden_state[0, :-1]
        logits = hidden.float() @ head.float().t()
        expected = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        actual = wrapped(None, ForwardRequest(inputs=inputs, temperature=1.0))[0]
        assert (actual[1:] - expected).abs().max() < 1e-6
        # Rounded to bfloat16, logits are others.
        rounded = logits.bfloat16().float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        assert (actual[1:] - rounded).abs().max() > 1e-4
        head.mul_(2)  # as a step or a load does it
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
