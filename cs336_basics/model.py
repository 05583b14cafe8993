"""The Transformer language model of CS336's assignment 1; which attention function it runs on is up to the caller."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cs336_basics.modules import (
    AttentionFunction,
    CausalMultiHeadSelfAttention,
    Embedding,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    head_dim,
    softmax,
)


class TransformerBlock(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then the same with the feed-forward layer (Xiong et al. 2020).

    Arguments and errors are those of `CausalMultiHeadSelfAttention` and `SwiGLU`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        positional_encoder: RotaryEmbedding,
        attention: str | AttentionFunction = "naive",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ln1 = RMSNorm(d_model, device=device, dtype=dtype)
        self.attn = CausalMultiHeadSelfAttention(d_model, num_heads, positional_encoder, attention, device, dtype)
        self.ln2 = RMSNorm(d_model, device=device, dtype=dtype)
        self.ffn = SwiGLU(d_model, d_ff, device, dtype)

    def forward(self, x: Float[Tensor, "... n d_model"]) -> Float[Tensor, "... n d_model"]:
        """The residual stream after this block."""
        x = x + self.attn(self.ln1(x))
        return x + self.ffn(self.ln2(x))


class BasicsTransformerLM(nn.Module):
    """A decoder-only Transformer: token embedding, pre-norm blocks, a last norm, and a projection onto the vocabulary.

    No biases, no dropout, no shared weights; positions enter through rotary embeddings. No tensor of size n x n belongs
    to the model: an attention function that needs a mask makes it for one call.

    `torch.compile(model, fullgraph=True)` makes one graph for each shape of token_ids, with dynamic=True too, for einx
    fixes the sizes that it sees. PyTorch raises at the ninth shape (`torch._dynamo.config.recompile_limit`).

    Args:
        vocab_size: the number of tokens.
        context_length: the longest sequence.
        d_model: the size of a token's vector.
        num_layers: the number of blocks.
        num_heads: attention heads of each block; d_model / num_heads is their size, which is even.
        d_ff: the inner size of the feed-forward layers.
        rope_theta: the base of the rotary embedding's angles.
        attention: `attention(q, k, v, is_causal) -> o` over tensors (batch, num_heads, n, d_model / num_heads), or a
            name: "naive", or one of `cs336_systems.attention.ATTENTION`, such as "flash_triton".
        device, dtype: where the parameters are made, and in which type. In half precision the norms and the rotary
            embedding still compute in float32.

    Raises:
        ValueError: a size below 1; num_heads that does not divide d_model, or into heads of odd size; a rope_theta that
            is not above 0; an unknown name.
        TypeError: `attention` is neither a name nor a function.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int,
        rope_theta: float = 10_000.0,
        attention: str | AttentionFunction = "naive",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {
            "vocab_size": vocab_size,
            "context_length": context_length,
            "d_model": d_model,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "d_ff": d_ff,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.vocab_size, self.context_length = vocab_size, context_length
        self.token_embeddings = Embedding(vocab_size, d_model, device, dtype)
        self.positional_encoder = RotaryEmbedding(context_length, head_dim(d_model, num_heads), rope_theta, device)
        self.layers = nn.ModuleList(
            TransformerBlock(d_model, num_heads, d_ff, self.positional_encoder, attention, device, dtype)
            for _ in range(num_layers)
        )
        self.ln_final = RMSNorm(d_model, device=device, dtype=dtype)
        self.lm_head = Linear(d_model, vocab_size, device, dtype)

    def forward(self, token_ids: Int[Tensor, "... n"]) -> Float[Tensor, "... n vocab_size"]:
        """The logits of the token that follows each position, given the tokens up to it.

        Args:
            token_ids: int32 or int64, 0 <= token_ids < vocab_size, 1 <= n <= context_length.

        Raises:
            ValueError: no tokens, or sequences longer than the context.
        """
        if token_ids.ndim == 0 or token_ids.numel() == 0:
            raise ValueError(f"token_ids must be (..., n) with at least one token, got shape {tuple(token_ids.shape)}")
        x = self.token_embeddings(token_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.ln_final(x))

    def num_parameters(self, non_embedding: bool = False) -> int:
        """The number of parameters: 2 V D + L (4 D^2 + 3 D F + 2 D) + D for V tokens, L layers, D = d_model, F = d_ff.

        Args:
            non_embedding: leave out the V D of the token embedding, which is looked up and not multiplied with.
        """
        embedding = self.token_embeddings.weight.numel() if non_embedding else 0
        return sum(parameter.numel() for parameter in self.parameters()) - embedding

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Int[Tensor, "... n"],
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "... new"]:
        """Tokens that continue each prompt, drawn one after another; the last context_length tokens are seen.

        Args:
            prompt_ids: one prompt, or a batch of prompts of equal length.
            max_new_tokens: how many tokens to draw at most.
            temperature: what logits are divided by before the softmax; 0 always takes the likeliest token.
            top_k: draw from the k likeliest tokens only; k beyond vocab_size allows all.
            top_p: of those, draw from the fewest likeliest ones that together have at least this probability (Holtzman
                et al. 2020, equation 2).
            eos_token_id: end of text: the last token of a continuation that comes to it. In a batch, continuations that
                end early are filled up with it, until all have ended.
            generator: the source of randomness, on the device of the model; PyTorch's own if None.

        Returns:
            The new tokens without the prompt, at most max_new_tokens of them, in the dtype of prompt_ids.

        Raises:
            ValueError: an empty prompt, tokens outside the vocabulary, or an option outside its range.
            TypeError: a prompt that is no tensor of integers, or an option that is no integer where one is wanted.
        """
        if not isinstance(prompt_ids, Tensor) or prompt_ids.dtype not in (torch.int32, torch.int64):
            given = prompt_ids.dtype if isinstance(prompt_ids, Tensor) else type(prompt_ids).__name__
            raise TypeError(f"prompt_ids must be a tensor of int32 or int64, got {given}")
        for name, value in (("max_new_tokens", max_new_tokens), ("top_k", top_k), ("eos_token_id", eos_token_id)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} must be an integer, got {value!r}")
        if prompt_ids.ndim == 0 or prompt_ids.numel() == 0:
            raise ValueError(
                f"prompt_ids must be (..., n) with at least one token, got shape {tuple(prompt_ids.shape)}"
            )
        smallest, largest = prompt_ids.min().item(), prompt_ids.max().item()
        if smallest < 0 or largest >= self.vocab_size:
            raise ValueError(f"prompt_ids must lie in [0, {self.vocab_size}), got {smallest} to {largest}")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or a positive number, got {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
        if eos_token_id is not None and not 0 <= eos_token_id < self.vocab_size:
            raise ValueError(f"eos_token_id must lie in [0, {self.vocab_size}), got {eos_token_id}")

        greedy = temperature < torch.finfo(torch.float32).tiny  # by which logits cannot be divided
        n_candidates = 1 if greedy else min(top_k or self.vocab_size, self.vocab_size)
        token_ids = prompt_ids.reshape(-1, prompt_ids.shape[-1])
        ended = torch.zeros_like(token_ids[:, :1], dtype=torch.bool)
        for _ in range(max_new_tokens):
            logits = self(token_ids[:, -self.context_length :])[:, -1]
            next_ids = draw_tokens(logits, n_candidates, temperature, top_p, generator).to(token_ids.dtype)
            if eos_token_id is not None:
                next_ids = torch.where(ended, eos_token_id, next_ids)
                ended = next_ids == eos_token_id
            token_ids = torch.cat((token_ids, next_ids), dim=-1)
            if eos_token_id is not None and ended.all():
                break
        new_ids = token_ids[:, prompt_ids.shape[-1] :]
        return new_ids.reshape(*prompt_ids.shape[:-1], new_ids.shape[-1])


def draw_tokens(
    logits: Float[Tensor, "batch vocab_size"],
    n_candidates: int,
    temperature: float,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Int[Tensor, "batch 1"]:
    """One of the n_candidates likeliest tokens of each row; the other arguments are those of `generate`."""
    logits, candidates = logits.float().topk(n_candidates, dim=-1)  # the likeliest first
    if n_candidates == 1:
        return candidates
    # With a largest logit of 0, what overflows at a low temperature is -inf, a probability of 0.
    probabilities = softmax((logits - logits[:, :1]) / temperature)
    if top_p is not None:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = torch.where(before < top_p, probabilities, 0)
    return candidates.gather(-1, torch.multinomial(probabilities, 1, generator=generator))
