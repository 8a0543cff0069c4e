"""Measures on a text how widely the attention of each layer is spread.

For each head and query it takes the entropy of the weights, divided by the logarithm of the number
of visible keys: 0 if all weight is on one key, 1 if all weights are equal. A layer's score is the
mean over heads and queries (Kim and Jung, Mathematics 2025, 13(15), 2366, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kvik.attention.base import LayerKV
from kvik.attention.layout import StepLayout
from kvik.attention.reference import ReferenceAttention
from kvik.config.config import EngineConfig
from kvik.config.kv_budget import check_model
from kvik.errors import ConfigError
from kvik.evaluate.windows import cut, longest_window, prompt_prefix, resolve_reader
from kvik.kernels.ops import Ops
from kvik.launch import load_tokenizer, resolve_config
from kvik.text.tokenizer import Tokenizer
from kvik.worker.graphs import EngineNetwork
from kvik.worker.input_batch import StepTensors
from kvik.worker.loading import load_network
from kvik.worker.platforms import inference_on, platform

WINDOW = 1024  # tokens read at once
TOKENS = 16_384  # tokens of the text to read
MIN_KEYS = 2  # keys of a query to count: the entropy of one key is 0

Progress = Callable[[str, float], None]


class EntropyAttention(ReferenceAttention):
    """The reference attention, which also sums the entropies of each layer."""

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops)
        self.sums: dict[int, float] = {}  # by the id of a layer's cache
        self.counts: dict[int, int] = {}  # likewise; queries times heads

    def see(self, kv: LayerKV, weights: Tensor, visible: Tensor) -> None:
        seen = visible.sum(-1)  # [queries]
        counted = seen >= MIN_KEYS
        entropy = -torch.special.xlogy(weights, weights).sum(-1)[:, counted]  # [heads, queries]
        shares = entropy.double() / seen[counted].double().log()
        layer = id(kv)  # layers that see other keys may use the same memory
        self.sums[layer] = self.sums.get(layer, 0.0) + float(shares.sum())
        self.counts[layer] = self.counts.get(layer, 0) + shares.numel()


def measure_entropy(
    config: EngineConfig, texts: Sequence[str], tokens: int, progress: Progress
) -> tuple[tuple[float, ...], int]:
    """Read texts in windows and measure each layer.

    Args:
        tokens: largest number of tokens to read.
        progress: called with the current work and the share that is done.

    Returns:
        The score of each of `full_layers`, 0 to 1, and how many tokens were read.

    Raises:
        KvikError: the model cannot be used, or the texts are too short.
    """
    check_model(resolve_config(config).model, "model")
    window = min(WINDOW, longest_window(config))
    tokenizer = load_tokenizer(resolve_reader(config, window))
    if tokenizer is None:
        raise ConfigError("model", "must have a tokenizer, as the data is text")
    windows = list(_windows(texts, tokenizer, window, tokens))
    return entropy_of(config, windows, progress), sum(map(len, windows))


def entropy_of(
    config: EngineConfig, windows: Sequence[Sequence[int]], progress: Progress
) -> tuple[float, ...]:
    """Return the score of each of `full_layers`, 0 to 1, over windows of tokens, read one by
    one."""
    config = replace(config, kernels="torch", attention_backend="reference", device="cpu")
    resolved = resolve_reader(config, max(map(len, windows)))
    with torch.inference_mode():
        torch.set_num_threads(resolved.runner.threads)
        chosen = platform(resolved)
        probe = EntropyAttention(chosen.parts.ops)
        path = Path(resolved.runner.model_path)
        groups, quantization = resolved.cache.groups, resolved.runner.quantization
        model = resolved.model
        network = load_network(resolved, chosen, model, path, groups, quantization, backend=probe)
    with inference_on(torch.device("cpu"))():
        for i, ids in enumerate(windows):
            progress("reading", i / len(windows))
            _read(network, ids, resolved.cache.block_size)
    layers = [id(network.kv.of(i)) for i in model.full_layers]
    return tuple(probe.sums[layer] / probe.counts[layer] for layer in layers)


def _windows(
    texts: Sequence[str], tokenizer: Tokenizer, window: int, tokens: int
) -> Iterator[tuple[int, ...]]:
    """Yield windows of at most `tokens` tokens in all; raise ConfigError if none has two tokens."""
    prefix, budget = prompt_prefix(tokenizer), tokens
    for text in texts:
        for span in cut(tokenizer.encode(text, add_special_tokens=False), prefix, window, window):
            ids = span.token_ids[:budget]
            if len(ids) >= MIN_KEYS:
                yield ids
            budget -= len(ids)
    if budget == tokens:
        raise ConfigError("data", f"must have {MIN_KEYS} tokens or more")


def _read(network: EngineNetwork, ids: Sequence[int], block_size: int) -> None:
    """Compute a window, in the first blocks of each group."""
    count = -(-len(ids) // block_size)
    layouts = []
    for group in range(len(network.groups)):
        first = 1 + group * count
        layouts.append(
            StepLayout(
                query_start_loc=torch.tensor([0, len(ids)], dtype=torch.int32),
                seq_lens=torch.tensor([len(ids)], dtype=torch.int32),
                block_table=torch.arange(first, first + count, dtype=torch.int32)[None],
                slot_mapping=first * block_size + torch.arange(len(ids)),
                num_scheduled=(len(ids),),
                contexts=(len(ids),),
                block_size=block_size,
                state_rows=torch.zeros(1, dtype=torch.int32),
            )
        )
    none = torch.empty(0, dtype=torch.int64)
    network.forward(StepTensors(torch.tensor(ids), torch.arange(len(ids)), tuple(layouts), none))
