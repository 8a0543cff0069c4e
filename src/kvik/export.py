"""Exports an unquantised model, a folder or a GGUF file, as one GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvik.attention.reference import ReferenceAttention
from kvik.core.sampling_params import SamplingParams
from kvik.errors import ModelError
from kvik.gguf.export import FILE_TYPES, model_metadata, token_id_metadata, tokenizer_metadata
from kvik.gguf.facts import KEYS, sampling_metadata
from kvik.gguf.reader import Buffer, OutTensor, Scalar, write_gguf
from kvik.kernels.reference.ops import REFERENCE
from kvik.model_files import ModelFiles, model_files
from kvik.models.model_spec import ModelSpec
from kvik.nn.builder import Builder
from kvik.nn.checkpoint import Checkpoint
from kvik.nn.gguf_checkpoint import open_weights
from kvik.nn.gguf_export import gguf_numbers, gguf_tensors
from kvik.nn.loader import check_weights
from kvik.nn.lora import merged
from kvik.nn.parameters import Parameters
from kvik.spec.kv import group_layers
from kvik.spec.model import DTYPE_BYTES
from kvik.spec.stored_weights import MXFP4_BLOCKS

# Types that matrices can be written in: the name for users -> the name in `FILE_TYPES`.
TYPES: Mapping[str, str] = {name.lower(): name for name in FILE_TYPES}


@dataclass(frozen=True, slots=True)
class Export:
    """A file that is ready to be written: everything that can be checked before has been."""

    metadata: Mapping[str, Scalar | Sequence[Scalar]]
    tensors: Sequence[OutTensor]

    @property
    def weights(self) -> int:
        """Number of elements of all tensors."""
        return sum(tensor.weights for tensor in self.tensors)

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.size for tensor in self.tensors)

    def write(self, path: Path, advance: Callable[[int], None]) -> None:
        """Write the file, completely or not at all.

        Args:
            advance: called with the number of bytes of each piece that was written.

        Raises:
            ModelError: weights are invalid or out of range of the type, or the file cannot be
                written.
        """
        tensors = [replace(tensor, data=_telling(tensor, advance)) for tensor in self.tensors]
        write_gguf(path, self.metadata, tensors)


def plan_export(path: Path, type: str, adapter: Path | None = None) -> Export:
    """Plan the export of a folder or file that `find_model` returned; no weights are read yet.

    Args:
        type: of the matrices, one of the values of `TYPES`.
        adapter: folder of a LoRA adapter to merge into the weights.

    Raises:
        ModelError: GGUF cannot describe the model, or it is quantised already. The MXFP4 experts of
            gpt-oss are allowed: they are copied as they are.
    """
    files = model_files(path)
    spec = files.spec()
    if spec.built is not None:
        raise ModelError("model", "is an engine folder: export the model it was built from")
    stored = spec.quantization
    schemes = [rule.scheme for rule in stored.rules if rule.scheme] if stored else []
    if any(scheme.layout != MXFP4_BLOCKS for scheme in schemes):
        reason = f"is stored quantised ({spec.quantization}): export the floats it was made from"
        raise ModelError("model", reason)
    metadata = {
        **model_metadata(spec, files.name(), type),
        **_tokenizer(files, spec),
        **token_id_metadata(spec),
        **sampling_metadata(_recommended(files.default_params())),
    }
    checkpoint: Checkpoint = open_weights(path)
    if adapter is not None:
        checkpoint = merged(checkpoint, adapter, spec)
    tensors = gguf_tensors(checkpoint, spec, type)
    _check(spec, checkpoint)
    return Export({**metadata, **gguf_numbers(checkpoint, spec)}, tensors)


def check_fit(path: Path) -> None:
    """Raise ModelError if a folder or file lacks weights of its model or has others; reads none."""
    _check(model_files(path).spec(), open_weights(path))


def _check(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Raise ModelError if the checkpoint does not fit a model whose weights are declared and never
    loaded."""
    parameters = Parameters(
        REFERENCE,
        dtype=torch.float32,
        device=torch.device("meta"),
        checkpoint=checkpoint,
        stored_quantization=spec.quantization,
    )
    groups = group_layers(spec.kv_specs(DTYPE_BYTES[spec.dtype]))
    builder = Builder(parameters, ReferenceAttention(REFERENCE), groups, max_model_len=1)
    spec.family.network(spec, builder)
    check_weights(builder.declared, checkpoint)


def _recommended(params: SamplingParams) -> Mapping[str, float | int]:
    """Return the values that differ from the engine's defaults, by the names of
    generation_config.json."""
    defaults = SamplingParams()
    return {
        name: getattr(params, name)
        for name in KEYS
        if getattr(params, name) != getattr(defaults, name)
    }


def _tokenizer(files: ModelFiles, spec: ModelSpec) -> Mapping[str, Scalar | Sequence[Scalar]]:
    if not files.has_tokenizer():
        return {}
    tokenizer = files.tokenizer()
    end = spec.eos_token_ids[0] if spec.eos_token_ids else None
    return tokenizer_metadata(
        tokenizer.library,
        spec.vocab_size,
        spec.bos_token_id,
        end,
        tokenizer.chat_template,
        spec.family.gguf_characters,
    )


def _telling(tensor: OutTensor, advance: Callable[[int], None]) -> Callable[[], Iterable[Buffer]]:
    def data() -> Iterator[Buffer]:
        for piece in tensor.data():
            yield piece
            advance(len(piece))

    return data
