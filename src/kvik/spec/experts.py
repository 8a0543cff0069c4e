"""Mixtures of experts (Shazeer et al. 2017): the parts of a layer with routed experts, and reading
them from config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from kvik.errors import shown
from kvik.spec.fields import MAX_LAYERS, MAX_WIDTH, Fields

MAX_EXPERTS = 1024  # of a layer (csrc/experts.hpp)
MAX_IN_ALL = 1 << 16  # of a model
# Keys of config.json for the number of experts in a layer.
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Keys for n, if only every n-th layer has experts.
STEP_KEYS = ("decoder_sparse_step", "interleave_moe_layer_step")
SWITCH = "enable_moe_block"  # of families that have experts or none
SPARSE, DENSE = "sparse", "dense"  # of `mlp_layer_types`
# As in csrc/arguments.hpp.
Scores = Literal["softmax", "sigmoid", "sparsemixer", "logit", "sqrtsoftplus"]
SCORES: tuple[Scores, ...] = get_args(Scores)


@dataclass(frozen=True, slots=True)
class Router:
    """How the experts of a token are chosen from its logits, one for each expert.

    Scores are the softmax or the sigmoid of the logits, or the root of their softplus. The experts
    with the highest score plus correction are chosen (DeepSeek-V3, arXiv 2412.19437); ties go to
    the lower id. The weight of a chosen expert is its score without correction. With "sparsemixer"
    (Liu et al. 2024, arXiv 2409.12136) scores are the logits. The weight is a softmax over the
    logits x that were not chosen before and are near the chosen one s: (s - x) / max(|x|, s) is at
    most twice the jitter. With "logit" scores are the logits, too, and the weight is the sigmoid of
    the chosen one.
    """

    # experts, active: number of experts, in total and per token.
    experts: int
    active: int
    scores: Scores = "softmax"  # the function of the logits
    corrected: bool = False  # there is a correction
    # groups, kept_groups: only experts of the `kept_groups` best of equal groups can be chosen
    # (DeepSeek-V2, arXiv 2405.04434, section 2.2.2).
    groups: int = 1
    kept_groups: int = 1
    # The score of a group is its best expert's, or the sum of its best two.
    group_by: Literal["best", "best two"] = "best"
    normalised: bool = True  # the weights of a token are divided by their sum
    scale: float = 1.0  # constant factor of the weights
    scaled: bool = False  # weights also have a learned factor per expert
    weigh_inputs: bool = False  # a weight multiplies its expert's input, else its output
    jitter: float = 0.0  # of "sparsemixer", which has no groups
    by_token: bool = False  # a table has the experts of each token of the vocabulary
    # Further experts, which return their input (LongCat-Flash, Meituan 2025, arXiv 2509.01322,
    # section 2.1). The logits and the correction have them last.
    zero: int = 0

    @property
    def outputs(self) -> int:
        """Number of logits."""
        return self.experts + self.zero

    @property
    def columns(self) -> int:
        """Columns of what `Ops.route` returns."""
        return self.active + (self.zero > 0)


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The feed-forward part of a layer with routed experts."""

    router: Router
    inner: int  # width of an expert
    shared: int = 0  # width of the shared expert, an MLP for every token; 0: none
    gated: bool = False  # its output is multiplied by the sigmoid of a number per token
    clipped: bool = False  # experts have the activation "clipped_swiglu"
    # SiLU of a gate is at most this in the shared expert, and up at most that far from 0; 0: any.
    shared_limit: float = 0.0

    @property
    def active_width(self) -> int:
        """Inner activations of a token."""
        return self.router.active * self.inner + self.shared


# config.json, number of layers -> the experts of each layer; None: it has a plain MLP.
ExpertsRule = Callable[[Fields, int], tuple[ExpertsSpec | None, ...]]


def read_experts(
    fields: Fields,
    layers: int,
    *,
    inner: str = "moe_intermediate_size",
    active: str = "num_experts_per_tok",
    router: Callable[[Fields, int, int], Router],
    shared: str = "",
    shared_width: str = "",
    gated: bool = True,
    first_dense: int = 0,
) -> tuple[ExpertsSpec | None, ...]:
    """Read the experts of each layer from config.json; None: a plain MLP.

    Args:
        inner: key of an expert's width.
        active: key of the number of experts per token.
        router: config.json, experts, experts per token -> the router.
        shared: key of the number of shared experts; "": none.
        shared_width: key of the width of a shared expert; "": none.
        gated: that expert has a gate.
        first_dense: default of `first_k_dense_replace`.

    Raises:
        ModelError: a field is missing or invalid.
    """
    count = expert_count(fields)
    if count * layers > MAX_IN_ALL:
        raise fields.error("num_hidden_layers", f"must give at most {MAX_IN_ALL} experts in all")
    num_active = fields.integer(active, 1, count)
    width = fields.integer(inner, 1, MAX_WIDTH)
    always = fields.integer(shared, 0, MAX_EXPERTS, 0) if shared else 0
    width_of_all = fields.integer(shared_width, 1, MAX_WIDTH) if shared_width else 0
    choice = router(fields, count, num_active)
    fields.choice("scoring_func", (choice.scores,), choice.scores)
    experts = ExpertsSpec(choice, width, width_of_all or always * width, gated and width_of_all > 0)
    sparse = sparse_layers(fields, layers, first_dense)
    return tuple(experts if is_sparse else None for is_sparse in sparse)


def expert_count(fields: Fields) -> int:
    """Return the number of experts in a layer, under any of the keys: newer files may use another
    family's."""
    key = next((key for key in EXPERT_KEYS if key in fields), EXPERT_KEYS[0])
    return fields.integer(key, 1, MAX_EXPERTS)


def sparse_layers(fields: Fields, layers: int, first_dense: int = 0) -> tuple[bool, ...]:
    """Return which layers have experts, by the keys of all families."""
    if "mlp_layer_types" in fields:
        types = fields.strings("mlp_layer_types")
        if len(types) != layers:
            raise fields.error("mlp_layer_types", f"must have {layers} entries, not {len(types)}")
        for kind in types:
            if kind not in (SPARSE, DENSE):
                message = f"must hold {SPARSE} or {DENSE}, not {shown(kind)}"
                raise fields.error("mlp_layer_types", message)
        return tuple(kind == SPARSE for kind in types)
    if "moe_layers" in fields:
        return tuple(layer in listed_layers(fields, "moe_layers") for layer in range(layers))
    first = fields.integer("first_k_dense_replace", 0, MAX_LAYERS, first_dense)
    every = fields.integer("moe_layer_freq", 1, MAX_LAYERS, 1)
    step_key = next((key for key in STEP_KEYS if key in fields), STEP_KEYS[0])
    step = fields.integer(step_key, 1, MAX_LAYERS, 1)
    dense = listed_layers(fields, "mlp_only_layers")
    return tuple(
        layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in dense
        for layer in range(layers)
    )


def listed_layers(fields: Fields, key: str) -> set[int]:
    """Return a list of layers; an empty set if absent."""
    listed = fields.raw(key) or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise fields.error(key, f"must be a list of integers, not {shown(listed)}")
    return set(listed)


def softmax_router(fields: Fields, experts: int, active: int) -> Router:
    """Softmax scores; weights are normalised if `norm_topk_prob` says so (OLMoE, Qwen)."""
    normalised = fields.boolean("norm_topk_prob", False)
    return Router(experts, active, normalised=normalised)


def normalised_router(fields: Fields, experts: int, active: int) -> Router:
    """Softmax over the chosen experts alone (Mixtral, arXiv 2401.04088)."""
    return Router(experts, active)


def corrected_router(fields: Fields, experts: int, active: int) -> Router:
    """Sigmoid scores with a correction, in groups (DeepSeek-V3, section 2.1.2)."""
    fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
    groups, groups_kept = read_groups(fields, experts, active)
    return Router(
        experts,
        active,
        "sigmoid",
        corrected=True,
        groups=groups,
        kept_groups=groups_kept,
        group_by="best two",
        normalised=fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 0.0, 1e6, 1.0),
    )


def read_groups(fields: Fields, experts: int, active: int) -> tuple[int, int]:
    """Return `n_group` and `topk_group`.

    Raises:
        ModelError: groups are not equal, or have fewer experts than a token gets.
    """
    groups = fields.integer("n_group", 1, experts, 1)
    groups_kept = fields.integer("topk_group", 1, groups, groups)
    if experts % groups:
        raise fields.error("n_group", f"must divide the {experts} experts, not {groups}")
    if active > experts // groups * groups_kept:
        raise fields.error(
            "topk_group", f"must leave at least {active} experts, not {groups_kept} groups"
        )
    return groups, groups_kept
