"""The demo's model: MiniMax-M3's text architecture, small, with seeded random weights, reading bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3VLForCausalLM,
    MiniMaxM3VLIndexer,
    MiniMaxM3VLTopKRouter,
)

from ..integrations.transformers.cache import SPARSE_LAYER

PREFILL_CHUNK = 512
LAYERS = ("full_attention", SPARSE_LAYER, SPARSE_LAYER, SPARSE_LAYER, SPARSE_LAYER)

# Scales of the random weights, chosen so that attention matters: with transformers' default initialisation every query
# would average thousands of values to almost nothing, and a wrong attention would hardly show in the logits.
_QUERY_NORM = 1.5  # the norm multiplies by 1 + this: scores have a standard deviation of about 2.5
_OUTPUT_GAIN = 2.0


def demo_config(vocab_size: int = 256) -> MiniMaxM3VLTextConfig:
    """A text configuration with MiniMax-M3's head dim, blocks, top-k and layer kinds, and everything else small."""
    return MiniMaxM3VLTextConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=128,
        dense_intermediate_size=512,
        shared_intermediate_size=256,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        num_experts_per_tok=2,
        num_local_experts=8,
        routed_scaling_factor=1.0,
        index_n_heads=2,
        index_head_dim=128,
        index_block_size=128,
        index_topk_blocks=16,
        index_local_blocks=1,
        layer_types=list(LAYERS),
        mlp_layer_types=["dense", "sparse", "sparse", "sparse", "sparse"],
        rope_parameters={"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
        bos_token_id=None,
        eos_token_id=None,
    )


def build_model(seed: int, device: str, config: MiniMaxM3VLTextConfig | None = None) -> Any:
    """A bfloat16 model whose weights depend on `seed` alone (they are drawn on the CPU), in eval mode on `device`."""
    generator = torch.Generator().manual_seed(seed)
    model = MiniMaxM3VLForCausalLM(demo_config() if config is None else config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("self_attn.q_norm.weight"):
                weight.fill_(_QUERY_NORM)
            elif weight.dim() >= 2:
                fan_in = 1 if "embed_tokens" in name else weight.shape[-1]
                weight.normal_(0.0, fan_in**-0.5, generator=generator)
                if name.endswith("o_proj.weight"):
                    weight.mul_(_OUTPUT_GAIN)
    return model.to(device=device, dtype=torch.bfloat16)


class Choices:
    """A model's discrete choices, recorded in one run and imposed on others: selected blocks and experts.

    Two correct attentions differ by rounding, and where the 16th and 17th block, or two experts, are almost tied,
    rounding decides the choice and the logits jump. Imposing recorded choices leaves the attention's own difference.
    """

    def __init__(self, model: Any) -> None:
        self._modules = [m for m in model.modules() if isinstance(m, (MiniMaxM3VLIndexer, MiniMaxM3VLTopKRouter))]
        self._recorded: list[Any] = []
        self.differing_steps: set[int] = set()
        """Steps of the last imposed run in which the model itself would have chosen otherwise."""

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep what the model chooses; replaces an earlier record."""
        self._recorded = []

        def keep(module: Any, args: Any, output: Any) -> None:
            self._recorded.append(output if isinstance(module, MiniMaxM3VLIndexer) else output[2])

        with self._hooks(keep):
            yield

    @contextmanager
    def impose(self) -> Iterator[None]:
        """Replace the model's choices by the recorded ones, in the order in which they were recorded."""
        self.differing_steps = set()
        calls = itertools.count()

        def replace(module: Any, args: Any, output: Any) -> Any:
            call = next(calls)
            chosen = self._recorded[call]
            own = output if isinstance(module, MiniMaxM3VLIndexer) else output[2]
            if not torch.equal(own.sort(dim=-1).values, chosen.sort(dim=-1).values):
                self.differing_steps.add(call // len(self._modules))
            if isinstance(module, MiniMaxM3VLIndexer):
                return chosen
            logits = output[0]
            weights = torch.sigmoid(logits.float()).gather(1, chosen)
            return logits, weights / weights.sum(dim=-1, keepdim=True), chosen

        with self._hooks(replace):
            yield

    @contextmanager
    def _hooks(self, hook: Any) -> Iterator[None]:
        handles = [module.register_forward_hook(hook) for module in self._modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def step(model: Any, tokens: Tensor, cache: Any) -> Tensor:
    """One forward pass of ``(1, tokens)`` on the cache; the last token's logits, float32 ``(vocab,)``."""
    # The second positional cache argument has two names (past_key_values, cache) in the supported versions.
    output = model(tokens, None, None, cache, use_cache=True, logits_to_keep=1)
    logits: Tensor = output.logits[0, -1].float()
    return logits
