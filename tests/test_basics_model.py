"""BasicsTransformerLM: its attention functions, causality, memory, sizes and generation."""

import copy
import importlib
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_basics.model import BasicsTransformerLM, draw_tokens
from cs336_basics.modules import CausalMultiHeadSelfAttention, RotaryEmbedding, attention_function, naive_attention
from cs336_basics.nn_utils import clip_gradient, cross_entropy
from cs336_basics.optimizer import AdamW
from cs336_systems.attention import ATTENTION
from cs336_systems.flash_pytorch import FlashAttention2Pytorch

from .machine import DEVICE, INTERPRETED, INTERPRETER_BFLOAT16, NATIVE, needs_triton, skip_if

VOCABULARY, CONTEXT, HEADS, HEAD_DIM, LAYERS = 50, 48, 2, 10, 2

every_attention = pytest.mark.parametrize(
    "attention", ["naive", "flash_pytorch", pytest.param("flash_triton", marks=needs_triton)]
)


def model(attention: Any = "naive", dtype: torch.dtype = torch.float32, **changes: Any) -> BasicsTransformerLM:
    """A small model, of the same weights on every machine; the head dim is even and no power of two."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "context_length": CONTEXT,
        "d_model": HEADS * HEAD_DIM,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "d_ff": 32,
    }
    return BasicsTransformerLM(**sizes | changes, attention=attention).to(DEVICE, dtype)


def tokens(*shape: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """The same token ids on every machine."""
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def loss_of(lm, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(lm(ids[:, :-1]), ids[:, 1:])


def gradients_of(lm: BasicsTransformerLM, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*lm.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


# Attention functions.


@every_attention
def test_every_attention_is_the_same_model(attention):
    """Logits and the gradients of all parameters are those of the naive attention, by name and by function."""
    ids = tokens(3, 41)
    naive = model()
    expected, expected_gradients = naive(ids), gradients_of(naive, loss_of(naive, ids))
    for injected in (attention, ATTENTION[attention].function):
        lm = model(injected)
        torch.testing.assert_close(lm(ids), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradients_of(lm, loss_of(lm, ids)), expected_gradients, rtol=1e-3, atol=1e-5)


def test_model_against_an_independent_one():
    """The whole network once more, by functions of PyTorch and the parameters' names."""
    lm, ids = model(), tokens(2, 30)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "ln" in name:
                parameter.uniform_(0.5, 1.5)
    weights = {name.removesuffix(".weight"): weight for name, weight in lm.state_dict().items()}
    turn = lm.positional_encoder

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[name], 1e-5)

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[name]).unflatten(-1, (HEADS, HEAD_DIM)).transpose(-2, -3)

    x = F.embedding(ids, weights["token_embeddings"])
    for i in range(LAYERS):
        y, attn = norm(x, f"layers.{i}.ln1"), f"layers.{i}.attn"
        q, k, v = (heads(y, f"{attn}.{name}_proj") for name in "qkv")
        o = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        x = x + F.linear(o.transpose(-2, -3).flatten(-2), weights[f"{attn}.output_proj"])
        y, ffn = norm(x, f"layers.{i}.ln2"), f"layers.{i}.ffn"
        gated = F.silu(F.linear(y, weights[f"{ffn}.w1"])) * F.linear(y, weights[f"{ffn}.w3"])
        x = x + F.linear(gated, weights[f"{ffn}.w2"])
    expected = F.linear(norm(x, "ln_final"), weights["lm_head"])
    torch.testing.assert_close(lm(ids), expected, rtol=1e-4, atol=1e-4)


def test_names_of_attention_functions():
    """Names are looked up in cs336_systems, save for "naive"; functions are taken as they are."""
    assert attention_function("naive") is naive_attention
    for name in ATTENTION.keys() - {"naive"}:
        assert attention_function(name) == ATTENTION[name].function
    assert attention_function(naive_attention) is naive_attention


def test_unknown_attention():
    """The error says what came and what there is."""
    with pytest.raises(ValueError, match=r"flash_pytorch, flash_triton.* naive.*; got 'flsh'"):
        model("flsh")
    with pytest.raises(TypeError, match="got 3"):
        model(3)


def test_without_cs336_systems(monkeypatch):
    """The package is imported and works where the other one is not installed; names of that one are unknown then."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("cs336_basics", "cs336_systems"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cs336_systems", None)
    fresh, *_ = (importlib.import_module(f"cs336_basics.{name}") for name in ("model", "nn_utils", "optimizer"))
    assert fresh.BasicsTransformerLM is not BasicsTransformerLM
    lm = fresh.BasicsTransformerLM(10, 8, 8, 1, 2, 16)
    assert lm(torch.tensor([[1, 2, 3]])).shape == (1, 3, 10)
    with pytest.raises(ValueError, match="one of naive; got 'flash_triton'"):
        fresh.BasicsTransformerLM(10, 8, 8, 1, 2, 16, attention="flash_triton")


@every_attention
def test_later_tokens_change_nothing(attention):
    """Logits up to position i depend on the tokens up to i only, and do depend on token i."""
    lm, ids = model(attention), tokens(2, 40)
    logits = lm(ids)
    for position in (1, 17, 39):
        changed = ids.clone()
        changed[:, position] = (changed[:, position] + 1) % VOCABULARY
        changed_logits = lm(changed)
        torch.testing.assert_close(changed_logits[:, :position], logits[:, :position], rtol=1e-5, atol=1e-5)
        assert (changed_logits[:, position:] - logits[:, position:]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("leading", [(), (2, 3)], ids=str)
@every_attention
def test_any_leading_dimensions(attention, leading):
    """A sequence alone and a batch of batches are what they are in one batch."""
    lm, ids = model(attention), tokens(*leading, 20)
    expected = lm(ids.reshape(-1, 20)).reshape(*leading, 20, VOCABULARY)
    torch.testing.assert_close(lm(ids), expected, rtol=1e-4, atol=1e-4)


# Precision, compiling, training.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["model", "autocast"])
@every_attention
def test_half_precision(attention, autocast, dtype):
    """A model in half precision, and a float32 model under autocast, are close to float32; gradients are finite."""
    if attention == "flash_triton" and INTERPRETED and dtype == torch.bfloat16:
        skip_if(INTERPRETER_BFLOAT16)
    ids = tokens(2, 33)
    expected = model()(ids)
    lm = model(attention, torch.float32 if autocast else dtype)
    with torch.autocast(DEVICE.type, dtype=dtype, enabled=autocast):
        logits = lm(ids)
        loss = loss_of(lm, ids)
    assert logits.dtype == dtype and loss.dtype == torch.float32
    error = (logits.float() - expected).norm() / expected.norm()
    assert error < 8 * torch.finfo(dtype).eps
    for name, gradient in gradients_of(lm, loss).items():
        assert gradient.isfinite().all() and gradient.any(), name


@every_attention
def test_attention_gets_one_dtype_under_autocast(attention):
    """Queries, keys and values arrive in the autocast dtype: the rotary embedding's float32 does not leak."""
    seen = []

    def spy(q, k, v, is_causal):
        seen.append({q.dtype, k.dtype, v.dtype})
        return ATTENTION[attention].function(q, k, v, is_causal)

    with torch.autocast(DEVICE.type, dtype=torch.float16):
        model(spy)(tokens(1, 5))
    assert seen == [{torch.float16}] * LAYERS


@every_attention
def test_compiled_in_one_graph(attention):
    """torch.compile(fullgraph=True) of the whole model, backward too, gives what eager gives."""
    torch.compiler.reset()
    lm, ids = model(attention, num_layers=1), tokens(2, 33)
    # On a CPU the graph is what matters, and inductor takes long; on a GPU the whole way is taken.
    compiled = torch.compile(lm, fullgraph=True, backend="inductor" if NATIVE else "aot_eager")
    torch.testing.assert_close(compiled(ids), lm(ids), rtol=1e-4, atol=1e-4)
    expected = gradients_of(lm, loss_of(lm, ids))
    torch.testing.assert_close(gradients_of(lm, loss_of(compiled, ids)), expected, rtol=1e-3, atol=1e-5)


def test_training_learns():
    """Loss, clipping and optimizer together learn a batch by heart."""
    lm, ids = model(), tokens(2, 12)
    optimizer = AdamW(lm.parameters(), lr=2e-2)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = loss_of(lm, ids)
        loss.backward()
        clip_gradient(lm.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 3 and losses[-1] < 0.5


# Parameters and memory.


def test_state_dict_keys_are_stable():
    """The names of the course's assignment 1, and no buffers: neither positions nor masks are saved."""
    of_layer = ["ln1", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj", "ln2", "ffn.w1", "ffn.w2"]
    of_layer += ["ffn.w3"]
    layers = [f"layers.{i}.{name}.weight" for i in range(LAYERS) for name in of_layer]
    expected = {"token_embeddings.weight", "ln_final.weight", "lm_head.weight", *layers}
    assert model().state_dict().keys() == expected


def test_weights_go_from_one_model_to_another():
    """To another attention function, and into a model made on the meta device, which has to_empty() fill its tables."""
    original, ids = model(), tokens(2, 20)
    with torch.device("meta"):
        lm = BasicsTransformerLM(VOCABULARY, CONTEXT, HEADS * HEAD_DIM, LAYERS, HEADS, 32, attention="flash_pytorch")
    assert lm.lm_head.weight.is_meta
    lm.to_empty(device=DEVICE).load_state_dict(original.state_dict())
    torch.testing.assert_close(lm(ids), original(ids), rtol=1e-4, atol=1e-4)


@every_attention
def test_copies_share_nothing(attention):
    """What happens to the original does not happen to its copy."""
    original, ids = model(attention), tokens(2, 20)
    copied, expected = copy.deepcopy(original), original(ids)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    assert torch.equal(copied(ids), expected)


SIZES = {
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl": (1600, 6400, 48, 25),
    "2.7b": (2560, 10240, 32, 32),
}


@pytest.mark.parametrize(("d_model", "d_ff", "num_layers", "num_heads"), SIZES.values(), ids=SIZES)
def test_number_of_parameters(d_model, d_ff, num_layers, num_heads):
    """Two tables over the vocabulary; per layer four square matrices, three of the feed-forward layer, two gains."""
    lm = BasicsTransformerLM(10_000, 256, d_model, num_layers, num_heads, d_ff, 10_000.0, device="meta")
    layer = 4 * d_model**2 + 3 * d_model * d_ff + 2 * d_model
    assert lm.num_parameters() == 2 * 10_000 * d_model + num_layers * layer + d_model
    assert lm.num_parameters(non_embedding=True) == 10_000 * d_model + num_layers * layer + d_model


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation in the block returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def test_no_mask_belongs_to_the_model():
    """Context 32,768 with 24 layers: no n x n tensor is made or kept, nor is one made for an injected attention."""
    n = 32768
    with LargestTensor() as largest:
        lm = BasicsTransformerLM(100, n, 64, 24, 4, 128, attention=lambda q, k, v, is_causal: q, device="meta")
        lm(torch.zeros(1, n, dtype=torch.int64, device="meta"))
    assert n * 128 <= largest.numel < n * n
    # The tables of cos and sin, one pair for all of the layers.
    assert sum(buffer.numel() for buffer in lm.buffers()) == 2 * n * 64 // 4 // 2


@pytest.mark.parametrize("attention", ["naive", "flash_pytorch", pytest.param("flash_triton", marks=needs_triton)])
def test_scores_exist_only_in_the_naive_attention(attention):
    """Forward and backward: the flash versions lead to no tensor of n x n; the naive one does, and the test sees it."""
    n = 512
    lm = model(attention, context_length=n, num_layers=1, num_heads=1, d_model=4, d_ff=4)
    ids = tokens(1, n + 1)
    with LargestTensor() as largest:
        loss_of(lm, ids).backward()
    assert (largest.numel >= n * n) == (attention == "naive")
    with LargestTensor() as largest:
        model("naive", context_length=n)
    assert largest.numel < n * n, "a mask was made with the model"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"vocab_size": -3}, "vocab_size must be at least 1, got -3"),
        ({"num_heads": 3}, "got 3 heads and d_model 20"),
        ({"num_heads": 4}, "even, got 5"),
    ],
    ids=str,
)
def test_sizes_that_make_no_model(changes, message):
    """Errors name what came."""
    with pytest.raises(ValueError, match=message):
        model(**changes)


def test_sequences_that_do_not_fit():
    """Longer than the context, or empty."""
    lm = model()
    assert lm(tokens(1, CONTEXT)).shape == (1, CONTEXT, VOCABULARY)
    with pytest.raises(ValueError, match="length 49; at most the context length, 48"):
        lm(tokens(1, CONTEXT + 1))
    for shape in ((2, 0), (0, 3), ()):
        with pytest.raises(ValueError, match="at least one token"):
            lm(torch.zeros(shape, dtype=torch.int64, device=DEVICE))


# Generation.


class Scripted(BasicsTransformerLM):
    """After token t it says t + 1, half as often t + 2, and half as often again t + 3; it keeps what it was shown."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, 6, 4, 1, 2, 4)
        self.seen: list[list[list[int]]] = []

    def forward(self, token_ids):
        self.seen.append(token_ids.tolist())
        logits = torch.full((*token_ids.shape, VOCABULARY), -30.0)
        for ahead in (1, 2, 3):
            logits.scatter_(-1, (token_ids[..., None] + ahead) % VOCABULARY, 5 - ahead * 0.6931)
        return logits


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_generate_greedily():
    """Temperature 0 takes the likeliest token each time; only the new tokens come back, a batch for a batch."""
    prompt = torch.tensor([[3, 4], [48, 47]])
    assert Scripted().generate(prompt, 4, temperature=0).tolist() == [[5, 6, 7, 8], [48, 49, 0, 1]]
    single = Scripted().generate(prompt[0].int(), 3, temperature=0)
    assert single.tolist() == [5, 6, 7] and single.dtype == torch.int32
    assert Scripted().generate(prompt, 0).shape == (2, 0)
    for cold in (1e-46, 5e-324):  # too small to divide by in float32
        assert Scripted().generate(prompt, 4, temperature=cold).tolist() == [[5, 6, 7, 8], [48, 49, 0, 1]]


def test_generate_slides_over_its_context():
    """Beyond the context length the last tokens are seen, and a prompt longer than it is no error."""
    lm = Scripted()
    assert lm.generate(torch.arange(9), 3, temperature=0).tolist() == [9, 10, 11]
    assert lm.seen == [[[3, 4, 5, 6, 7, 8]], [[4, 5, 6, 7, 8, 9]], [[5, 6, 7, 8, 9, 10]]]
    lm = Scripted()
    lm.generate(torch.tensor([5]), 7, temperature=0)
    assert [len(sequence) for (sequence,) in lm.seen] == [1, 2, 3, 4, 5, 6, 6]


def test_generate_stops_at_end_of_text():
    """End of text is the last token; in a batch it fills up what ended early, and the longest decides."""
    lm = Scripted()
    assert lm.generate(torch.tensor([3]), 20, temperature=0, eos_token_id=6).tolist() == [4, 5, 6]
    assert len(lm.seen) == 3
    batch = Scripted().generate(torch.tensor([[3], [1]]), 20, temperature=0, eos_token_id=6)
    assert batch.tolist() == [[4, 5, 6, 6, 6], [2, 3, 4, 5, 6]]
    assert Scripted().generate(torch.tensor([6]), 3, temperature=0, eos_token_id=6).tolist() == [7, 8, 9]


def test_generate_is_reproducible():
    """The generator is the only source of randomness; PyTorch's own is left alone."""
    prompt = torch.zeros(20, 1, dtype=torch.int64)
    before = torch.random.get_rng_state()
    first, again, other = (Scripted().generate(prompt, 5, generator=seeded(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    # The models above were made from PyTorch's own numbers, so those are drawn again from where they stood.
    torch.random.set_rng_state(before)
    lm = Scripted()
    after_making = torch.random.get_rng_state()
    lm.generate(prompt, 2, generator=seeded())
    assert torch.equal(torch.random.get_rng_state(), after_making)


def frequencies(logits: list[float], draws: int = 20_000, **options: Any) -> list[float]:
    """How often each token is drawn."""
    arguments: dict[str, Any] = {
        "n_candidates": len(logits),
        "temperature": 1.0,
        "top_p": None,
        "generator": seeded(),
    } | options
    drawn = draw_tokens(torch.tensor(logits).expand(draws, -1), **arguments)
    return (drawn.flatten().bincount(minlength=len(logits)) / draws).tolist()


LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"n_candidates": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"n_candidates": 1}, [0, 1, 0, 0]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"temperature": 1e6}, [0.25] * 4),
        ({"temperature": 1e-6}, [0, 1, 0, 0]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.75}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 1.0}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        # Of the two likeliest the first alone has 4/7.
        ({"top_p": 0.5, "n_candidates": 2}, [0, 1, 0, 0]),
    ],
    ids=str,
)
def test_distribution_of_draws(options, expected):
    """Temperature, top-k and top-p, each and together; what is excluded is never drawn."""
    got = frequencies(LOGITS, **options)
    assert got == pytest.approx(expected, abs=0.02)
    assert [share == 0 for share in got] == [share == 0 for share in expected]


def test_top_k_of_equal_logits():
    """k tokens remain, also where more are equally likely."""
    assert sum(share > 0 for share in frequencies([0.0] * 6, n_candidates=2)) == 2


def test_top_p_that_is_reached_exactly():
    """The first of two tokens has the half that is asked for."""
    assert sum(share > 0 for share in frequencies([0.0] * 2, top_p=0.5)) == 1


def test_generate_passes_its_options_on():
    """top_k, top_p and temperature reach the draw."""
    prompt = torch.zeros(200, 1, dtype=torch.int64)
    lm = Scripted()
    assert set(lm.generate(prompt, 1, generator=seeded()).flatten().tolist()) == {1, 2, 3}
    assert set(lm.generate(prompt, 1, top_k=2, generator=seeded()).flatten().tolist()) == {1, 2}
    assert set(lm.generate(prompt, 1, top_k=1000, generator=seeded()).flatten().tolist()) == {1, 2, 3}
    assert set(lm.generate(prompt, 1, top_p=0.8, generator=seeded()).flatten().tolist()) == {1, 2}
    assert set(lm.generate(prompt, 1, temperature=0.01, generator=seeded()).flatten().tolist()) == {1}


@every_attention
def test_generate_with_a_model(attention):
    """The likeliest token of the logits at the last position, step by step; no graph is built."""
    lm, prompt = model(attention), tokens(2, 5)
    expected = prompt
    for _ in range(4):
        expected = torch.cat((expected, lm(expected)[:, -1:].argmax(-1)), dim=-1)
    new = lm.generate(prompt, 4, temperature=0)
    assert torch.equal(new, expected[:, 5:]) and not new.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ({"temperature": -0.5}, "temperature must be 0 or a positive number, got -0.5"),
        ({"temperature": float("nan")}, "temperature must be .* got nan"),
        ({"temperature": float("inf")}, "temperature must be .* got inf"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\], got 1.5"),
        ({"eos_token_id": VOCABULARY}, r"eos_token_id must lie in \[0, 50\), got 50"),
        ({"prompt_ids": torch.tensor([3, VOCABULARY])}, r"prompt_ids must lie in \[0, 50\), got 3 to 50"),
        ({"prompt_ids": torch.tensor([-1])}, r"prompt_ids must lie in \[0, 50\), got -1"),
        ({"prompt_ids": torch.zeros(2, 0, dtype=torch.int64)}, r"at least one token, got shape \(2, 0\)"),
        ({"prompt_ids": [1]}, "prompt_ids must be a tensor of int32 or int64, got list"),
        ({"prompt_ids": torch.ones(1)}, r"prompt_ids must be a tensor of int32 or int64, got torch\.float32"),
        ({"eos_token_id": 2.0}, "eos_token_id must be an integer, got 2.0"),
        ({"eos_token_id": True}, "eos_token_id must be an integer, got True"),
        ({"top_k": 2.5}, "top_k must be an integer, got 2.5"),
    ],
    ids=str,
)
def test_generate_refuses(options, message):
    """Errors name the argument, what came and what is allowed."""
    with pytest.raises((ValueError, TypeError), match=message):
        Scripted().generate(**{"prompt_ids": torch.tensor([1]), "max_new_tokens": 1} | options)


def test_an_autograd_function_is_given_by_its_apply():
    function: Any = FlashAttention2Pytorch  # a class can be called, too
    with pytest.raises(TypeError, match=r"a function .* got .*; an autograd\.Function is given by its apply"):
        BasicsTransformerLM(8, 4, 8, 1, 2, 8, attention=function)


@pytest.mark.parametrize(("d_model", "num_heads"), [(10, 3), (8, 16)])
def test_heads_that_do_not_fit_are_named(d_model, num_heads):
    """Before the rotary embedding complains of the size of a head that there cannot be."""
    with pytest.raises(ValueError, match=f"num_heads must divide d_model, got {num_heads} heads and d_model {d_model}"):
        BasicsTransformerLM(8, 4, d_model, 1, num_heads, 8)
    with pytest.raises(ValueError, match="num_heads must divide d_model, got 0 heads"):
        CausalMultiHeadSelfAttention(8, 0, RotaryEmbedding(4, 2))
