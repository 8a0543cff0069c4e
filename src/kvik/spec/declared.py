"""What a network declares: its matrices with their roles, norms, tables and other parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvik.spec.experts import Router

# Role of a matrix in a block; "gates": of a gated delta net or of attention, and "wide_gates" those
# that are computed from narrow vectors, or these from values; "mixture": small ones that weigh
# residual streams, or keys of a pool, and "streams" those that make streams or read them at the
# end; "o_down": a matrix for each group of heads, before "o"; "": in no block, as in draft heads.
Role = Literal[
    "qkv",
    "q_down",
    "q_up",
    "kv_down",
    "kv_up",
    "gates",
    "wide_gates",
    "o_down",
    "o",
    "gate_up",
    "up",
    "down",
    "router",
    "expert_gate_up",
    "expert_up",
    "expert_down",
    "shared_gate",
    "shared_gate_up",
    "shared_up",
    "shared_down",
    "head",
    "embedding",
    "positions",
    "token_inputs",
    "streams",
    "mixture",
    "",
]
# Roles of matrices that stay floats in every format: small ones whose errors would change the
# choice of experts or the mixture of streams, and those of heads or groups of heads: "kv_up", which
# is applied to queries instead of keys, and "o_down".
UNQUANTISED: frozenset[Role] = frozenset({"router", "shared_gate", "kv_up", "o_down", "mixture"})
# Roles of matrices that no adapter of a request changes.
FIXED_FOR_REQUESTS: frozenset[Role] = UNQUANTISED | {"head", "token_inputs", "streams"}
# Roles of matrices that are too small to be divided among processes.
SMALL: frozenset[Role] = frozenset(
    {"q_down", "kv_down", "gates", "wide_gates", "router", "shared_gate", "mixture"}
)


@dataclass(frozen=True, slots=True)
class DeclaredLinear:
    """Linear layers over the same inputs, by their names in checkpoints."""

    layer: int | None  # the block's number; None: it is in no block
    role: Role
    names: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]  # of each name
    bias: bool
    tied: bool = False  # its weight is the embedding's, and the names are not in the checkpoint
    by_head: bool = False  # rows are stored KV head by KV head: its queries, its key, its value
    # Number of equal parts of the heads, if rows are stored part by part: its queries, its values,
    # its keys; 0: they are not.
    shards: int = 0
    router: Router | None = None  # the router that chooses it, if it is an expert's
    mixed: bool = False  # rows of gate and up are interleaved, and floats are transposed
    clamped: bool = False  # of gate and up: their product is not linear in up
    transposed: bool = False  # the checkpoint stores [inputs, outputs]
    uses: int = 1  # how often a forward multiplies with it
    bare: bool = False  # its weight is a tensor of this name, without a suffix, and stays floats

    @property
    def adaptable(self) -> bool:
        """Whether adapters that requests choose may change its outputs (`nn.lora`)."""
        return self.role not in FIXED_FOR_REQUESTS and self.router is None

    @property
    def num_parameters(self) -> int:
        weights = 0 if self.tied else self.inputs * sum(self.outputs)
        return weights + self.bias * sum(self.outputs)


@dataclass(frozen=True, slots=True)
class DeclaredNorm:
    """A norm over `size` channels."""

    layer: int | None
    name: str
    size: int
    biased: bool  # it has a bias in addition to its gain
    # The role of the matrices that read its output, possibly times a gate, if nothing else reads
    # it; else "". Their inputs may be several normalised vectors.
    before: Role
    offset: float = 0.0  # added to the stored gain

    @property
    def num_parameters(self) -> int:
        return self.size * (2 if self.biased else 1)


@dataclass(frozen=True, slots=True)
class DeclaredTable:
    """A lookup table: of tokens or of positions."""

    role: Role
    name: str
    rows: int
    width: int
    tied: bool = False

    @property
    def num_parameters(self) -> int:
        return self.rows * self.width


@dataclass(frozen=True, slots=True)
class DeclaredOther:
    """Parameters of a layer that are neither a matrix nor a norm: of a convolution, the correction
    of a router, the sinks of attention."""

    layer: int | None
    name: str
    num_parameters: int
    shape: tuple[int, ...] = ()  # in the checkpoint; (): one dimension
    logarithm: bool = False  # it is the logarithm of the heads' decay rates


@dataclass(slots=True)
class Declaration:
    """Everything that a model declares, in order."""

    linears: list[DeclaredLinear] = field(default_factory=list)
    norms: list[DeclaredNorm] = field(default_factory=list)
    tables: list[DeclaredTable] = field(default_factory=list)
    others: list[DeclaredOther] = field(default_factory=list)
    block: str = ""  # prefix of the names in a block; {} is its number
    skipped: list[str] = field(default_factory=list)  # prefixes of names that are not read

    @property
    def num_parameters(self) -> int:
        parts: Sequence[DeclaredLinear | DeclaredNorm | DeclaredTable | DeclaredOther]
        parts = (*self.linears, *self.norms, *self.tables, *self.others)
        return sum(part.num_parameters for part in parts)

    @property
    def embedding(self) -> DeclaredTable:
        """The table of tokens."""
        none = DeclaredTable("embedding", "", 0, 0)  # draft heads use their model's
        return next((table for table in self.tables if table.role == "embedding"), none)

    @property
    def head(self) -> DeclaredLinear:
        return next(linear for linear in self.linears if linear.role == "head")

    def of_block(self, layer: int) -> list[DeclaredLinear]:
        """Return the linear layers of a block."""
        return [linear for linear in self.linears if linear.layer == layer]

    def in_block(self, name: str) -> str:
        """Return the name of a block's layer or norm without the prefix of the block."""
        head, _, tail = self.block.partition("{}")
        return name.removeprefix(head).partition(tail)[2]
