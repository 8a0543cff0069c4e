"""A tiny Gemma 4 and its assistant, as transformers saves them, and its drafts by definition."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from helpers.tiny_models import tiny_model
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

WINDOW = 24
HIDDEN, WIDTH = 32, 24  # of the model, of the assistant
LAST = ("post_attention_layernorm", "post_feedforward_layernorm")  # norms of what is added
SHAPE: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "num_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]


@dataclass(frozen=True, eq=False)
class Assistant:
    """An assistant and its model, of transformers."""

    target: Any
    model: Any

    @torch.no_grad()
    def drafts(self, text: tuple[int, ...], count: int) -> list[int]:
        """Return the likeliest tokens after a text: the model's own next token is its last."""
        ids, found = torch.tensor([list(text)]), []
        more = {"return_shared_kv_states": True, "output_hidden_states": True}
        states = self.target.model(input_ids=ids[:, :-1], **more)
        shared = dict(states.shared_kv_states)
        windowed = KINDS[0]  # the window also has a place for the newest token
        shared[windowed] = tuple(part[:, :, -(WINDOW - 1) :] for part in shared[windowed])
        hidden, token = states.last_hidden_state[:, -1:], ids[:, -1:]
        for _ in range(count):
            embedded = self.target.get_input_embeddings()(token)
            output = self.model(
                inputs_embeds=torch.cat((embedded, hidden), -1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=shared,
            )
            token, hidden = output.logits.argmax(-1), output.last_hidden_state
            found.append(int(token))
        return found


def save_assistant(root: Path) -> Assistant:
    """Save a model in root / "model" and an assistant in root / "head". The likeliest token of both
    is often the last one again, so that the assistant is often right."""
    target = tiny_model(
        "Gemma4",
        **SHAPE,
        num_hidden_layers=6,
        layer_types=KINDS * 2,
        num_kv_shared_layers=3,
    )
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(
            **SHAPE,
            vocab_size=96,
            hidden_size=WIDTH,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=128,
            layer_types=KINDS,
            num_kv_shared_layers=3,
            vocab_size_per_layer_input=0,
        ),
        backbone_hidden_size=HIDDEN,
        use_ordered_embeddings=True,  # of which all are read
        num_centroids=4,
        centroid_intermediate_top_k=4,
    )
    torch.manual_seed(5)
    # transformers 5.23 refuses layers that all read other keys.
    modes = property(lambda config: ["reuse"] * config.num_hidden_layers)
    with patch.object(Gemma4TextConfig, "kv_sharing_modes", modes):
        model = Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for owner in (target, model):
            for name, parameter in owner.named_parameters():
                if any(last in name for last in LAST):
                    parameter.mul_(0.5)
        # The projection of a token's embedding keeps the order of the tokens: so do the logits.
        embedding = target.get_input_embeddings().weight
        mixed = torch.randn(WIDTH, HIDDEN) / HIDDEN**0.5
        model.post_projection.weight.normal_()
        model.pre_projection.weight.normal_(std=0.1)[:, :HIDDEN] += mixed
        model.lm_head.weight.copy_(embedding @ mixed.T)
        model.masked_embedding.token_ordering.copy_(torch.randperm(96))
    target.save_pretrained(root / "model")
    model.save_pretrained(root / "head")
    return Assistant(target, model)
