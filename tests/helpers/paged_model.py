"""A model with a paged cache but no engine, which computes given tokens of given sequences."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from kvik.attention.base import AttentionBackend
from kvik.attention.layout import StepLayout
from kvik.attention.reference import ReferenceAttention
from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE, stored_weight
from kvik.kernels.weights import Matrix, MatrixSpec, Weight
from kvik.model_files import model_files
from kvik.models.model_spec import ModelSpec
from kvik.nn.builder import Builder
from kvik.nn.gguf_checkpoint import open_weights
from kvik.nn.kv_formats import allocate_kv, allocate_states
from kvik.nn.loader import load_model
from kvik.nn.lora import AdapterSlots
from kvik.nn.parameters import Parameters
from kvik.spec.kv import group_layers, stored_as
from kvik.spec.network import ForwardContext

MAX_SEQUENCES = 8  # with a state


class PagedModel:
    """A model with numbered sequences, whose blocks are allocated in a shuffled order."""

    def __init__(
        self,
        folder: Path | None,
        *,
        spec: ModelSpec | None = None,
        dtype: torch.dtype = torch.float32,
        ops: Ops = REFERENCE,
        backend: AttentionBackend | None = None,
        quantization: str = "none",
        kv_format: str = "auto",
        block_size: int = 4,
        num_blocks: int = 256,
        max_model_len: int = 0,
        seed: int = 0,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """Load a model from a folder or file, or make random weights for `spec` if it is None."""
        self.spec = spec or model_files(folder).spec()
        specs = stored_as(self.spec.kv_specs(dtype.itemsize), kv_format)
        self.groups = group_layers(specs)
        self.backend = backend or ReferenceAttention(ops)
        device = torch.device("cpu")
        parameters = Parameters(
            ops,
            dtype=dtype,
            device=device,
            checkpoint=open_weights(folder) if folder else None,
            stored_quantization=self.spec.quantization,
            quantization=quantization,
            adapters=adapters,
        )
        length = max_model_len or self.spec.max_position_embeddings
        self.builder = Builder(parameters, self.backend, self.groups, max_model_len=length)
        self.model, _ = load_model(self.spec, self.builder, seed=seed)
        self.cache = allocate_kv(self.groups, num_blocks, block_size, dtype, device)
        self.kv = self.cache.layers
        self.states = allocate_states(self.spec.states, MAX_SEQUENCES, device)
        self.states.pool.fill_(float("nan"))  # left by other requests
        self.block_size = block_size
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        self._free: list[int] = order.tolist()
        self._tables: dict[int, list[list[int]]] = {}  # sequence -> blocks of each group
        self._lengths: dict[int, int] = {}

    def step(self, chunks: dict[int, list[int]]) -> dict[int, Tensor]:
        """Run the next tokens of some sequences together.

        Returns:
            Logits [tokens, vocab] of each sequence's tokens.
        """
        lengths = [len(ids) for ids in chunks.values()]
        contexts, positions = [], []
        for sequence, ids in chunks.items():
            tables = self._tables.setdefault(sequence, [[] for _ in self.groups])
            start = self._lengths.get(sequence, 0)
            positions.append(torch.arange(start, start + len(ids)))
            contexts.append(start + len(ids))
            for table in tables:
                while len(table) * self.block_size < contexts[-1]:
                    table.append(self._free.pop())
            self._lengths[sequence] = contexts[-1]
        with torch.inference_mode():
            ctx = ForwardContext(
                positions=torch.cat(positions),
                metadata=tuple(
                    self.backend.plan(
                        self._layout(list(chunks), i, lengths, contexts, positions),
                        group.spec.window,
                    )
                    for i, group in enumerate(self.groups)
                ),
                kv=self.kv,
                states=self.states.layers,
            )
            ids = torch.tensor([token for part in chunks.values() for token in part])
            logits = self.model.logits(self.forward(ids, ctx))
        return dict(zip(chunks, logits.split(lengths), strict=True))

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> hidden [tokens, hidden], normalised."""
        x = self.model.enter(ids, ctx)
        inputs = self.model.token_inputs(ids, x, ctx)
        return self.model.leave(self.model.blocks(x, replace(ctx, token_inputs=inputs)))

    def logits(self, ids: list[int], chunk: int = 0, sequence: int = 0) -> Tensor:
        """Return logits [tokens, vocab] of a prompt, in chunks of `chunk` tokens (0: at once)."""
        size = chunk or len(ids)
        parts = [ids[i : i + size] for i in range(0, len(ids), size)]
        return torch.cat([self.step({sequence: part})[sequence] for part in parts])

    def greedy(self, prompt: list[int], steps: int, chunk: int = 0, sequence: int = 0) -> list[int]:
        """Return the greedy continuation; each new token is computed alone, over the cache."""
        logits = self.logits(prompt, chunk, sequence)
        output = [int(logits[-1].argmax())]
        while len(output) < steps:
            output.append(int(self.step({sequence: output[-1:]})[sequence][-1].argmax()))
        return output

    def _layout(
        self,
        sequences: list[int],
        group: int,
        lengths: list[int],
        contexts: list[int],
        positions: list[Tensor],
    ) -> StepLayout:
        shares = self.groups[group].shares
        tables = [[b * shares for b in self._tables[sequence][group]] for sequence in sequences]
        width = max(len(table) for table in tables)
        padded = torch.tensor([table + [0] * (width - len(table)) for table in tables])
        slots = [
            padded[i][where // self.block_size] * self.block_size + where % self.block_size
            for i, where in enumerate(positions)
        ]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        return StepLayout(
            query_start_loc=starts.to(torch.int32),
            seq_lens=torch.tensor(contexts, dtype=torch.int32),
            block_table=padded.to(torch.int32),
            slot_mapping=torch.cat(slots),
            num_scheduled=tuple(lengths),
            contexts=tuple(contexts),
            block_size=self.block_size,
            state_rows=torch.tensor([MAX_SEQUENCES - 1 - s for s in sequences], dtype=torch.int32),
        )


@dataclass
class Packing:
    """Records the weights of all matrices, in order."""

    weights: list[Weight] = field(default_factory=list)

    def matrix(self, spec: MatrixSpec) -> Matrix:
        made = REFERENCE.matrix(spec)
        self.weights.append(stored_weight(made))
        return made

    @property
    def ops(self) -> Ops:
        return replace(REFERENCE, matrix=self.matrix)

    def loaded_bytes(self, num_parameters: int) -> int:
        """Return the bytes of a model in bfloat16, all matrices of which are packed."""
        packed = sum(part.nbytes for one in self.weights for part in one.tensors.values())
        matrices = sum(weight.outputs * weight.inputs for weight in self.weights)
        return packed + 2 * (num_parameters - matrices)
