"""The manifest of an engine folder: a model whose weights are packed for the kernels of one kind of
machine (`kvik build`). It records what the folder was built for and where each tensor is stored.

A folder contains engine.json (the manifest), weights.bin, and the model's own config.json,
tokenizer and templates.
"""

from __future__ import annotations

import hashlib
import math
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kvik.errors import ModelError, shown
from kvik.options import Text
from kvik.spec.fields import Fields, read_json
from kvik.spec.weight_kind import FLOATS

MANIFEST = "engine.json"
WEIGHTS = "weights.bin"
FORMAT = 1  # of the manifest and of the first page of the weights
# The first page of the weights: a seal that is unique to the build, then zeros.
SEAL_BYTES, HEAD_BYTES = 32, 4096
ALIGNMENT = 4096

ITEM_BYTES: Mapping[str, int] = {
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int32": 4,
    "int64": 8,
}
KERNELS = ("native", "triton", "torch")
MAX_BYTES = 1 << 50
MAX_SIZE = 1 << 40
MAX_PARTS = 1 << 18
MAX_DIMENSIONS = 8
SEAL = Text(f"{2 * SEAL_BYTES} hexadecimal digits", f"[0-9a-f]{{{2 * SEAL_BYTES}}}")
DIGEST = Text("64 hexadecimal digits", "[0-9a-f]{64}")  # of SHA-256
CHUNK = 1 << 22  # bytes read at a time


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is stored in the weights."""

    offset: int  # of its first byte
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Entry:
    """A matrix or a plain tensor."""

    kind: str  # `WeightKind.name` of the matrix; "": a plain tensor
    parts: Mapping[str, Place]  # the tensors that make it up, by name


@dataclass(frozen=True, slots=True)
class FileFacts:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of engine.json."""

    kvik: str  # the version that built it
    kernels: str  # "native", "triton" or "torch"
    packing: str  # memory layout of matrices; see `kernels.packing`
    instruction_set: str  # of the machine that built it, for information
    byte_order: str  # "little" or "big"
    # dtype, quantization: as in `EngineConfig`.
    dtype: str
    quantization: str
    seal: str  # hexadecimal; the weights begin with it
    files: Mapping[str, FileFacts]  # every file of the folder except the manifest
    tensors: Mapping[str, Entry]  # by their names in the model

    @property
    def weight_bytes(self) -> int:
        return self.files[WEIGHTS].size

    def as_json(self) -> dict[str, object]:
        return {"format": FORMAT, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Built:
    """What decides whether and how an engine folder runs; attributes as of `Manifest`."""

    kernels: str
    packing: str
    dtype: str
    quantization: str
    weight_bytes: int

    def __str__(self) -> str:
        quantized = "" if self.quantization == "none" else f", {self.quantization}"
        return f"engine folder for {self.kernels} kernels, {self.dtype}{quantized}"


def is_engine_folder(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a folder.

    Raises:
        ModelError: it is not a manifest, has another format or byte order, or describes tensors
            that exceed the weights.
    """
    fields = Fields(read_json(folder / MANIFEST), MANIFEST)
    if fields.raw("format") != FORMAT:
        written, by = shown(fields.raw("format")), shown(fields.raw("kvik"))
        message = f"is {written}, written by kvik {by}; this kvik reads {FORMAT}"
        raise fields.error("format", f"{message}. {rebuild(folder)}")
    order = fields.choice("byte_order", ("little", "big"))
    if order != sys.byteorder:
        raise fields.error(
            "byte_order", f"is {order}, this machine's is {sys.byteorder}. {rebuild(folder)}"
        )
    files = _files(fields)
    if WEIGHTS not in files:
        raise fields.error("files", f"must hold {WEIGHTS}")
    return Manifest(
        kvik=fields.text("kvik"),
        kernels=fields.choice("kernels", KERNELS),
        packing=fields.text("packing"),
        instruction_set=fields.text("instruction_set"),
        byte_order=order,
        dtype=fields.choice("dtype", FLOATS),
        quantization=fields.text("quantization"),
        seal=fields.text("seal", SEAL),
        files=files,
        tensors=_tensors(fields, files[WEIGHTS].size),
    )


def rebuild(folder: Path) -> str:
    """Return the advice to build a folder again."""
    return f"Build it again: kvik build MODEL -o {folder.name}"


OF_MODULE = re.compile(r"[0-9]+_\w+/config\.json")  # of sentence-transformers


def _files(fields: Fields) -> dict[str, FileFacts]:
    files = {}
    for name in fields.mapping("files") or {}:
        plain = (Path(name).name == name and name.isprintable()) or OF_MODULE.fullmatch(name)
        if not plain or name in ("", ".", "..", MANIFEST):
            raise fields.error("files", f"must name files of its folder, not {shown(name)}")
        inner = fields.inside("files").inside(name)
        size = inner.integer("size", 0, MAX_BYTES)
        files[name] = FileFacts(size, inner.text("sha256", DIGEST))
    return files


def _tensors(fields: Fields, end: int) -> dict[str, Entry]:
    tensors = fields.inside("tensors")
    entries, count = {}, 0
    for name in fields.mapping("tensors") or {}:
        inner = tensors.inside(name)
        parts = inner.inside("parts")
        places = {part: _place(parts.inside(part), end) for part in inner.mapping("parts") or {}}
        count += len(places)
        if count > MAX_PARTS:
            raise fields.error("tensors", f"must hold at most {MAX_PARTS} tensors")
        entries[name] = Entry(inner.text("kind"), places)
    return entries


def _place(fields: Fields, end: int) -> Place:
    shape = fields.raw("shape")
    sizes: list[int] = shape if isinstance(shape, list) else [-1]
    good = all(type(n) is int and 0 <= n <= MAX_SIZE for n in sizes)
    if not good or len(sizes) > MAX_DIMENSIONS:
        raise fields.error("shape", f"must be a list of sizes, not {shown(shape)}")
    offset = fields.integer("offset", HEAD_BYTES, MAX_BYTES)
    place = Place(offset, fields.choice("dtype", ITEM_BYTES), tuple(sizes))
    if offset % ALIGNMENT:
        raise fields.error("offset", f"must be a multiple of {ALIGNMENT}, not {offset}")
    if offset + place.size > end:
        raise fields.error("offset", f"its {place.size} bytes do not lie within {WEIGHTS}")
    return place


def read_built(folder: Path) -> Built | None:
    """Return what an engine folder was built for, after the quick checks; None: no engine folder.

    Raises:
        ModelError: the folder is damaged, or built for another version or machine.
    """
    if not is_engine_folder(folder):
        return None
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return Built(
        manifest.kernels,
        manifest.packing,
        manifest.dtype,
        manifest.quantization,
        manifest.weight_bytes,
    )


def check_seal(folder: Path, seal: bytes, manifest: Manifest) -> None:
    """Check that weights that begin with `seal` belong to the manifest.

    Raises:
        ModelError: they are of another build.
    """
    if seal.hex() != manifest.seal:
        raise ModelError(WEIGHTS, f"is not of the same build as {MANIFEST}. {rebuild(folder)}")


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check the size of each file, the seal of the weights, and the hashes of the other files.

    This is quick, because the weights are not read.

    Raises:
        ModelError: a file is missing, truncated or altered.
    """
    for name, facts in manifest.files.items():
        _check_size(folder, name, facts)
        if name == WEIGHTS:
            check_seal(folder, _read_seal(folder), manifest)
        else:
            _check_hash(folder, name, facts)


def verify(folder: Path) -> int:
    """Check every byte of an engine folder, and return their number.

    Raises:
        ModelError: a file was altered since it was built.
    """
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    _check_hash(folder, WEIGHTS, manifest.files[WEIGHTS])
    return sum(facts.size for facts in manifest.files.values())


def file_facts(path: Path) -> FileFacts:
    """Return the size and hash of a file.

    Raises:
        OSError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileFacts(size, digest.hexdigest())


def _check_size(folder: Path, name: str, facts: FileFacts) -> None:
    with _reading(folder, name):
        status = (folder / name).stat()
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(name, f"is not a file. {rebuild(folder)}")
    if status.st_size != facts.size:
        raise ModelError(
            name, f"has {status.st_size} bytes, {facts.size} by {MANIFEST}. {rebuild(folder)}"
        )


def _check_hash(folder: Path, name: str, facts: FileFacts) -> None:
    with _reading(folder, name):
        current = file_facts(folder / name)
    if current != facts:
        raise ModelError(name, f"was altered since it was built. {rebuild(folder)}")


def _read_seal(folder: Path) -> bytes:
    """Return the first bytes of the weights, where their seal should be."""
    with _reading(folder, WEIGHTS), (folder / WEIGHTS).open("rb") as file:
        return file.read(SEAL_BYTES)


@contextmanager
def _reading(folder: Path, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(name, f"cannot be read ({error.strerror}). {rebuild(folder)}") from None
