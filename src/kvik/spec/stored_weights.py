"""How a quantised checkpoint stores its linear layers: `quantization_config` of config.json.

The terms are those of the tools: AutoAWQ, GPTQ (AutoGPTQ, GPTQModel, AutoRound),
compressed-tensors, bitsandbytes, and fp8 as transformers and DeepSeek write it. GGUF files give a
block type for each tensor instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Final, Literal, get_args

from kvik.errors import shown
from kvik.spec.fields import Fields
from kvik.spec.patterns import Matcher, PatternError
from kvik.spec.weight_kind import MX_GROUP, Rounding

# GGUF's layouts: rows of blocks, each with its scales.
# fmt: off
BlockLayout = Literal[
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "MXFP4",
]
# fmt: on
Layout = (
    Literal["awq", "gptq", "pack-quantized", "int-quantized", "fp8"]
    | Literal["mxfp4-pack-quantized", "mxfp4-blocks", "mxfp4-deepseek"]
    | Literal["nvfp4-pack-quantized", "nvfp4-modelopt"]
    | Literal["bnb-nf4", "bnb-fp4", "bnb-int8", "bitlinear", "autobitlinear"]
    | BlockLayout
)
BLOCK_LAYOUTS: tuple[BlockLayout, ...] = get_args(BlockLayout)
# E2M1 in groups of 32 that share a power of two.
MXFP4: Final = "mxfp4-pack-quantized"
MXFP4_BLOCKS: Final = "mxfp4-blocks"  # of gpt-oss
MXFP4_DEEPSEEK: Final = "mxfp4-deepseek"  # of DeepSeek-V4
MXFP4_LAYOUTS: frozenset[Layout] = frozenset({"MXFP4", MXFP4, MXFP4_BLOCKS, MXFP4_DEEPSEEK})
# E2M1 in groups of 16 with E4M3 scales, which have a common factor.
NVFP4: Final = "nvfp4-pack-quantized"
NVFP4_MODELOPT: Final = "nvfp4-modelopt"
NVFP4_LAYOUTS: frozenset[Layout] = frozenset({NVFP4, NVFP4_MODELOPT})
# Codes of the numbers of a table, in blocks of the flattened matrix.
BNB_TABLES: Mapping[Layout, str] = {"bnb-nf4": "nf4", "bnb-fp4": "bnb_fp4"}
BNB_GROUP = 64
# Numbers of -1, 0 and 1 with one scale, by the names of transformers' classes; that of the first
# divides.
DIVIDED: Final = "bitlinear"
TERNARY_LAYOUTS: tuple[Layout, ...] = (DIVIDED, "autobitlinear")
IQ4_LAYOUTS: frozenset[Layout] = frozenset({"IQ4_NL", "IQ4_XS"})

KEY = "quantization_config"
MAX_GROUP = 1 << 20
GPTQ_BITS = (2, 3, 4, 8)
NV_GROUP = 16
E4M3, E5M2 = ("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2")
HEAD = "lm_head"
HEADS = (HEAD, "embed_out")  # the second of GPT-NeoX
LINEAR, REGEX = "Linear", "re:"  # the class of linear layers; prefix of a regular expression


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """How the weight of a linear layer is stored."""

    layout: Layout  # of its tensors; "int-quantized" and "fp8" have an element for each number
    bits: int
    group: int = 0  # number of inputs that share a scale; 0: all of them
    band: int = 1  # number of outputs that share a scale; 0: all of them
    symmetric: bool = True  # there are no zero points
    minima: bool = False  # groups have minima in place of zero points: w = q * scale - minimum
    ordered: bool = False  # act-order: a tensor gives the group of each input
    zeros_less_one: bool = False  # zero points are stored minus 1
    quantize_activations: bool = False  # inputs of integer weights are also quantised to 8 bits
    fp8_activations: Rounding = "float"  # quantisation of the inputs of fp8 weights
    e5m2: bool = False  # eight-bit floats are E5M2, else E4M3

    @property
    def in_runs(self) -> bool:
        """Whether runs of rows of the layer can be read separately."""
        return self.layout in BLOCK_LAYOUTS

    def __str__(self) -> str:
        if self.layout in BLOCK_LAYOUTS:
            return self.layout
        number = f"{self.bits} bits"
        if self.layout == "fp8":
            number = "fp8 (E5M2)" if self.e5m2 else "fp8"
        elif self.layout in MXFP4_LAYOUTS:
            number = "mxfp4"
        elif self.layout in NVFP4_LAYOUTS:
            number = "nvfp4"
        elif self.layout in BNB_TABLES:
            number = self.layout.removeprefix("bnb-")
        if self.group and self.band != 1:
            shares = f"a scale for each block of {self.band} x {self.group}"
        elif self.group:
            shares = f"in groups of {self.group}"
        else:
            shares = "a scale for each output" if self.band else "one scale"
        words = [f"{number}, {shares}"]
        words += [] if self.symmetric else ["zero points"]
        words += ["act-order"] if self.ordered else []
        words += ["activations in 8 bits"] if self.quantize_activations else []
        words += ["activations in fp8"] if self.fp8_activations != "float" else []
        words += ["by calibrated scales"] if self.fp8_activations == "static" else []
        return ", ".join(words)


# Scope of the text model in checkpoints that also have encoders of images or sound; in newer ones
# those of its trunk.
TEXT_MODEL, TRUNKS = "language_model", ("model.language_model", "model.text_model")


def stored_names(name: str) -> tuple[str, ...]:
    """Return the forms of a declared name in checkpoints: unchanged; without its first component,
    as in files of the bare trunk; or, in files of models that read images, in the scope of the text
    model or of its trunk; and of the former in newer files, with the first two components
    swapped."""
    first, _, rest = name.partition(".")
    second, _, tail = rest.partition(".")
    nested = f"{TEXT_MODEL}.{name}", *(f"{trunk}.{rest}" for trunk in TRUNKS)
    return name, rest, *nested, f"{second}.{first}.{tail}"


@dataclass(frozen=True, slots=True)
class StoredRule:
    """The scheme of some layers."""

    scheme: StoredScheme | None  # None: plain floats
    # Full names of layers, in any form that checkpoints have.
    names: frozenset[str] = frozenset()
    # Names or parts of names, of one or more whole dot-separated components.
    within: frozenset[str] = frozenset()
    every: bool = False  # the rule applies to every layer

    def fits(self, layer: str) -> bool:
        """Return whether the rule applies to a layer."""
        if self.every:
            return True
        forms = stored_names(layer)
        if not self.names.isdisjoint(forms):
            return True
        lengths = _lengths(self.within)
        return any(
            not self.within.isdisjoint(_runs(form, length)) for length in lengths for form in forms
        )


@lru_cache(maxsize=64)
def _lengths(names: frozenset[str]) -> frozenset[int]:
    """Return the numbers of components of names."""
    return frozenset(name.count(".") + 1 for name in names)


def _runs(name: str, length: int) -> list[str]:
    """Return all runs of `length` components of a name."""
    parts = name.split(".")
    if length == 1:
        return parts
    return [".".join(parts[end - length : end]) for end in range(length, len(parts) + 1)]


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """How a checkpoint stores its linear layers."""

    method: str  # `quant_method`
    # The first rule that applies to a layer decides; without one it is plain floats.
    rules: tuple[StoredRule, ...]
    embeddings: bool = False  # the rules also apply to the token embedding; else it is plain floats
    kv_scales: bool = False  # the checkpoint has calibrated scales for a quantised KV cache

    def scheme(self, layer: str) -> StoredScheme | None:
        """Return the scheme of a linear layer, by its name in the checkpoint."""
        for rule in self.rules:
            if rule.fits(layer):
                return rule.scheme
        return None

    def embedding_scheme(self, name: str) -> StoredScheme | None:
        """Return the scheme of the token embedding, by its name in the checkpoint."""
        return self.scheme(name) if self.embeddings else None

    def __str__(self) -> str:
        schemes = dict.fromkeys(str(rule.scheme) for rule in self.rules if rule.scheme)
        return f"{self.method}: {'; '.join(schemes)}"


def stored_alike(stored: Sequence[StoredScheme | None]) -> list[int]:
    """Return the lengths of the runs of consecutive layers with the same scheme. Each run can
    become one matrix without conversion."""
    return [len(list(run)) for _, run in groupby(stored)]


class _Layers:
    """The names of a model's linear layers, from which regular expressions select: in all forms
    that checkpoints have.

    Each layer is selected at most once, because the first rule decides.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        # form -> all forms of its layer
        self._unmatched = {form: forms for forms in map(stored_names, self.names) for form in forms}
        self.forms = self._unmatched.keys() | set()
        self._matcher = Matcher()

    def matching(self, fields: Fields, key: str, patterns: Iterable[str]) -> frozenset[str]:
        """Return the matching layers that no earlier pattern has selected, in all forms.

        Args:
            fields, key: where the patterns come from, for errors.

        Raises:
            ModelError: an invalid pattern.
        """
        chosen: set[str] = set()
        for pattern in patterns:
            try:
                names = self._named(pattern) or self._matcher.matching(pattern, self._unmatched)
            except PatternError as error:
                raise fields.error(key, f"holds {shown(pattern)}, which {error}") from None
            for name in names:
                chosen.update(forms := self._unmatched.get(name, ()))
                for form in forms:
                    self._unmatched.pop(form, None)
        return frozenset(chosen)

    @staticmethod
    def _named(pattern: str) -> list[str]:
        """Return the name of a pattern that is merely one, of which there may be very many."""
        name = re.fullmatch(r"\^((?:[\w-]|\\\W)+)\$", pattern)
        return [re.sub(r"\\(.)", r"\1", name[1])] if name else []


def read_stored_quantization(fields: Fields, layers: Iterable[str]) -> StoredQuantization | None:
    """Read how layers are stored according to config.json; None: as plain floats.

    Args:
        layers: names of all linear layers of the model, without those of a head that drafts, from
            which regular expressions select.

    Raises:
        ModelError: an unknown method or layout, or an invalid field.
    """
    if fields.mapping(KEY) is None:
        return None
    inner = fields.inside(KEY)
    if EXPERTS not in inner and EXPERTS in fields:  # files of DeepSeek-V4 have it outside
        inner = inner.changed({EXPERTS: fields.raw(EXPERTS)})
    method = inner.choice("quant_method", tuple(METHODS))
    kv_scales = inner.raw("kv_cache_scheme") is not None
    known = _Layers(layers)
    # Of layers that are not the model's, tensors decide; for the others they must fit config.json.
    outside = StoredRule(None, frozenset(inner.strings(IN_FLOATS)) - known.forms)
    rules = METHODS[method](inner, known)
    return StoredQuantization(method, (outside, *rules), kv_scales=kv_scales)


def _awq(fields: Fields, layers: _Layers) -> list[StoredRule]:
    fields.choice("version", ("gemm", "GEMM"), "gemm")
    scheme = StoredScheme(
        "awq", fields.integer("bits", 4, 4, 4), _group(fields, "group_size", 128), symmetric=False
    )
    return [_skipped(fields, "modules_to_not_convert"), _rest(scheme)]


def _gptq(fields: Fields, layers: _Layers) -> list[StoredRule]:
    if fields.boolean("is_marlin_format", False):
        raise fields.error("is_marlin_format", "must be false: convert the weights to gptq")
    rules = []
    for pattern, changed in _changed(fields, "dynamic"):
        excluded = pattern.startswith("-:")
        scheme = None if excluded else _gptq_scheme(changed)
        expression = pattern.removeprefix("-:" if excluded else "+:")
        rules.append(StoredRule(scheme, layers.matching(fields, "dynamic", (expression,))))
    if not fields.boolean("lm_head", False):
        rules.append(StoredRule(None, within=frozenset(HEADS)))
    scheme, names = _gptq_scheme(fields), _chosen(fields, "modules_in_block_to_quantize")
    return [*rules, StoredRule(scheme, within=frozenset(names)) if names else _rest(scheme)]


def _gptq_scheme(fields: Fields) -> StoredScheme:
    key = "checkpoint_format" if "checkpoint_format" in fields else "format"
    written = fields.choice(key, ("gptq", "gptq_v2"), "gptq")
    return StoredScheme(
        "gptq",
        _gptq_bits(fields, "bits"),
        _group(fields, "group_size", 128),
        symmetric=fields.boolean("sym", True),
        ordered=fields.boolean("desc_act", False),
        zeros_less_one=written == "gptq",
    )


def _gptq_bits(fields: Fields, key: str) -> int:
    bits = fields.integer(key, GPTQ_BITS[0], GPTQ_BITS[-1])
    if bits not in GPTQ_BITS:
        raise fields.error(key, f"must be one of {GPTQ_BITS}, not {bits}")
    return bits


def _changed(fields: Fields, key: str) -> Iterator[tuple[str, Fields]]:
    """Yield the names in an object of exceptions, each with the fields that are valid for it."""
    for name, changes in (fields.mapping(key) or {}).items():
        if not isinstance(changes, Mapping):
            raise fields.error(key, f"must hold objects, not {shown(changes)}")
        yield name, fields.changed(changes)


# AutoRound's name of a layout -> whether zero points are stored minus 1; None: AutoAWQ's.
AUTO_ROUND: Mapping[str, bool | None] = {
    "auto_round:auto_gptq": True,
    "auto_round:gptq": True,
    "auto_round": False,
    "auto_round:gptqmodel": False,
    "auto_round:auto_awq": None,
    "auto_round:awq": None,
}
FLOAT_BITS = 16


def _auto_round(fields: Fields, layers: _Layers) -> list[StoredRule]:
    """A name in `extra_config` is that of a layer, or else a regular expression that is searched
    for. Names of layers have precedence."""
    for key in ("rotation_config", "spinquant_config"):
        if fields.mapping(key):
            raise fields.error(key, "must be left out: weights cannot be rotated")
    skipped = fields.strings("modules_to_not_convert")
    exceptions = _changed(fields, "extra_config")
    schemes = {name: _auto_round_scheme(changed) for name, changed in exceptions}
    rules = [StoredRule(None, _searched(fields, "modules_to_not_convert", layers, skipped))]
    for scheme in dict.fromkeys(schemes.values()):  # one rule for all: there may be many experts
        names = frozenset(name for name in schemes if schemes[name] == scheme)
        rules.append(StoredRule(scheme, names))
    for name, scheme in schemes.items():
        if not _is_name(name):
            rules.append(StoredRule(scheme, _searched(fields, "extra_config", layers, (name,))))
    rules.append(StoredRule(None, within=frozenset(HEADS)))
    scheme, blocks = _auto_round_scheme(fields), _auto_round_blocks(fields)
    inside = StoredRule(scheme, within=blocks)
    # They may be names of a model with an encoder, whose decoder is stored without it.
    return [*rules, inside if any(map(inside.fits, layers.names)) else _rest(scheme)]


def _auto_round_scheme(fields: Fields) -> StoredScheme | None:
    if fields.integer("bits", GPTQ_BITS[0], 32) >= FLOAT_BITS:
        return None
    fields.choice("data_type", ("int",), "int")
    fields.integer("act_bits", FLOAT_BITS, 32, FLOAT_BITS)
    less_one = AUTO_ROUND[fields.choice("packing_format", AUTO_ROUND, "auto_round:auto_gptq")]
    group = _group(fields, "group_size", 128)
    if less_one is None:
        return StoredScheme("awq", fields.integer("bits", 4, 4), group, symmetric=False)
    bits, symmetric = _gptq_bits(fields, "bits"), fields.boolean("sym", True)
    return StoredScheme("gptq", bits, group, symmetric=symmetric, zeros_less_one=less_one)


def _auto_round_blocks(fields: Fields) -> frozenset[str]:
    """Return the names of the blocks that are quantised: one text, or lists of names."""
    key = "block_name_to_quantize"
    text = fields.raw(key)
    names = text.split(",") if isinstance(text, str) else _chosen(fields, key)
    return frozenset(name.strip() for name in names)


def _is_name(pattern: str) -> bool:
    """Return whether a regular expression is merely a name."""
    return re.fullmatch(r"[\w.-]+", pattern) is not None


def _searched(fields: Fields, key: str, layers: _Layers, patterns: Iterable[str]) -> frozenset[str]:
    """Return the layers in whose names a pattern is."""
    return layers.matching(fields, key, (f".*(?:{pattern})" for pattern in patterns))


IN_FLOATS = "layers_in_floats"  # what `with_layers_in_floats` adds
EXPERTS = "expert_dtype"  # of routed experts, if it differs
# A tensor of all experts of a layer, which bitsandbytes leaves as floats.
_STACKED = re.compile(r"(.+\.experts)\.[a-z_]+_proj")
_OF_WEIGHT = re.compile(r"(.+)\.weight(?![a-z])(.*)")  # a layer, and a part of how it is stored


def with_layers_in_floats(config: dict[str, object], tensors: Iterable[str]) -> dict[str, object]:
    """Return the config.json of a quantised model with the names of layers that are floats.

    bitsandbytes excludes some without saying so: experts that are no linear layers, and layers that
    had other names when it excluded them. Other tools do not say it of heads that draft, such as
    `eh_proj` of DeepSeek-V3.

    Args:
        tensors: names of all tensors of the checkpoint.
    """
    stored = config.get(KEY)
    if not isinstance(stored, Mapping):
        return config
    layers, quantised = set[str](), set[str]()
    for name in tensors:
        if weight := _OF_WEIGHT.fullmatch(name):
            (quantised if weight[2] else layers).add(weight[1])
        elif name.endswith((".SCB", ".scale")):
            quantised.add(name.rpartition(".")[0])
        elif stacked := _STACKED.fullmatch(name):
            layers.add(stacked[1])
    return {**config, KEY: {**stored, IN_FLOATS: sorted(layers - quantised)}}


def _bitsandbytes(fields: Fields, layers: _Layers) -> list[StoredRule]:
    """The head is left as floats, unless the layers that are left are listed.

    Whether the scales of blocks are quantised too, `bnb_4bit_use_double_quant`, is seen from the
    tensors; `llm_int8_threshold` is of activations, which are not rounded here.
    """
    loaded = [
        fields.boolean(f"load_in_{bits}bit", fields.boolean(f"_load_in_{bits}bit", False))
        for bits in (4, 8)
    ]
    if loaded[0] == loaded[1]:
        raise fields.error("load_in_4bit", "or else load_in_8bit must be true")
    if loaded[0]:
        number = fields.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        storage = ("uint8", "float16", "bfloat16", "float32")
        fields.choice("bnb_4bit_quant_storage", storage, "uint8")
        layout: Layout = "bnb-nf4" if number == "nf4" else "bnb-fp4"
        scheme = StoredScheme(layout, 4, BNB_GROUP)
    else:
        if fields.boolean("llm_int8_has_fp16_weight", False):
            raise fields.error("llm_int8_has_fp16_weight", "must be false")
        scheme = StoredScheme("bnb-int8", 8)
    key = "llm_int8_skip_modules"
    skipped = fields.strings(key) if key in fields else HEADS
    patterns = (rf"(?:{name})(?:(?<=\.)|(?=\.|$))" for name in skipped if not _is_name(name))
    matched = layers.matching(fields, key, patterns)
    names = fields.strings(IN_FLOATS)
    experts = frozenset(name for name in names if name.endswith(".experts"))
    floats = StoredRule(None, frozenset(names), experts)
    return [floats, StoredRule(None, matched, frozenset(skipped)), _rest(scheme)]


def _fp8(fields: Fields, layers: _Layers) -> list[StoredRule]:
    number = fields.choice("fmt", (*E4M3, *E5M2), E4M3[0])
    fields.choice("scale_fmt", ("float", "ue8m0"), "float")  # the latter: powers of two
    band, group = _block(fields, "weight_block_size") or (0, 0)
    static = fields.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    skipped = _skipped(fields, "modules_to_not_convert", "ignored_layers")
    if number in E5M2:  # no kernel supports E5M2: the weights become floats, with float inputs
        return [skipped, _rest(StoredScheme("fp8", 8, group, band, e5m2=True))]
    rounded: Rounding = "static" if static else "group" if group else "token"
    rules = [_rest(StoredScheme("fp8", 8, group, band, fp8_activations=rounded))]
    if fields.choice(EXPERTS, ("fp8", "fp4"), "fp8") == "fp4":
        experts = StoredScheme(MXFP4_DEEPSEEK, 4, MX_GROUP)
        rules.insert(0, StoredRule(experts, within=frozenset({"experts"})))
    # DeepSeek-V4 does not say which layers are floats: the tensors do.
    return [skipped, StoredRule(None, frozenset(fields.strings(IN_FLOATS))), *rules]


def _fbgemm_fp8(fields: Fields, layers: _Layers) -> list[StoredRule]:
    skipped = _skipped(fields, "modules_to_not_convert")
    return [skipped, _rest(StoredScheme("fp8", 8, fp8_activations="token"))]


def _mxfp4(fields: Fields, layers: _Layers) -> list[StoredRule]:
    """The experts of gpt-oss are MXFP4, other layers floats."""
    scheme = StoredScheme(MXFP4_BLOCKS, 4, MX_GROUP)
    skipped = _skipped(fields, "modules_to_not_convert")
    return [skipped, StoredRule(scheme, within=frozenset({"experts"}))]


def _compressed_tensors(fields: Fields, layers: _Layers) -> list[StoredRule]:
    sparsity = fields.inside("sparsity_config")
    if sparsity.raw("format") not in (None, "dense"):
        raise sparsity.error("format", f"must be dense, not {shown(sparsity.raw('format'))}")
    if fields.mapping("transform_config"):
        raise fields.error("transform_config", "must be empty: weights cannot be transformed")
    ignored = _named(fields, "ignore") | _matched(fields, "ignore", layers)
    groups = fields.inside("config_groups")
    named, matched, rest = [], [], []
    for name in fields.mapping("config_groups") or {}:
        group = groups.inside(name)
        scheme = _compressed_scheme(group, fields)
        # Names take precedence over patterns, and patterns over the class of layers.
        named.append(StoredRule(scheme, _named(group, "targets")))
        matched.append(StoredRule(scheme, _matched(group, "targets", layers)))
        rest += [_rest(scheme)] if LINEAR in group.strings("targets") else []
    if LINEAR in fields.strings("ignore"):
        return []
    return [StoredRule(None, ignored), *named, *matched, *rest]


def _compressed_scheme(group: Fields, fields: Fields) -> StoredScheme | None:
    """Return the scheme of a config group; None: its weights are not quantised."""
    if group.mapping("weights") is None:
        return None
    integers = ("pack-quantized", "int-quantized")
    formats = (*integers, "float-quantized", "naive-quantized", MXFP4, NVFP4)
    owner = group if "format" in group else fields
    format = owner.choice("format", formats)
    weights, inputs = group.inside("weights"), group.mapping("input_activations")
    if format in (MXFP4, NVFP4):
        return _compressed_fp4(group, weights, mx=format == MXFP4)
    kind = weights.choice("type", ("int", "float"), "int")
    packed = format == "pack-quantized"
    if kind == "float" and format in integers:
        raise weights.error("type", f"must be int in the format {format}, not float")
    if kind == "int" and format == "float-quantized":
        raise weights.error("type", "must be float in the format float-quantized, not int")
    bits = weights.integer("num_bits", 8 if kind == "float" else 2, 8, 8)
    symmetric = weights.boolean("symmetric", True)
    if kind == "float" and not symmetric:
        raise weights.error("symmetric", "must be true for floats")
    if packed and bits not in GPTQ_BITS:
        raise weights.error("num_bits", f"must be one of {GPTQ_BITS}, not {bits}")
    band, width = _strategy(weights)
    order = weights.raw("actorder")
    rounded = _fp8_activations(group, width) if kind == "float" else "float"
    return StoredScheme(
        "fp8" if kind == "float" else "pack-quantized" if packed else "int-quantized",
        bits,
        width,
        band,
        symmetric=symmetric,
        ordered=order is True or order in ("group", "dynamic"),
        quantize_activations=kind == "int" and inputs is not None,
        fp8_activations=rounded,
    )


def _compressed_fp4(group: Fields, weights: Fields, *, mx: bool) -> StoredScheme:
    """Return the scheme of MXFP4 or NVFP4. Inputs of the latter may be four-bit floats too; they
    are not rounded to those."""
    strategy, size = ("group", MX_GROUP) if mx else ("tensor_group", NV_GROUP)
    weights.choice("type", ("float",), "int")
    weights.integer("num_bits", 4, 4, 8)
    weights.choice("strategy", (strategy,), "group")
    weights.integer("group_size", size, size, size)
    if not weights.boolean("symmetric", True):
        raise weights.error("symmetric", "must be true for floats")
    if mx and group.mapping("input_activations") is not None:
        raise group.error("input_activations", f"must be null in the format {MXFP4}")
    return StoredScheme(MXFP4 if mx else NVFP4, 4, size)


def _modelopt(fields: Fields, layers: _Layers) -> list[StoredRule]:
    """The names of layers that are not quantised may hold wildcards."""
    algorithm = fields.choice("quant_algo", ("FP8", "NVFP4", "W4A16_NVFP4"))
    scheme = StoredScheme(NVFP4_MODELOPT, 4, NV_GROUP)
    if algorithm == "FP8":
        scheme = StoredScheme("fp8", 8, 0, 0, fp8_activations="static")
    else:
        groups, names = fields.inside("config_groups"), fields.mapping("config_groups") or {}
        for group in (fields, *(groups.inside(name).inside("weights") for name in names)):
            group.integer("group_size", NV_GROUP, NV_GROUP, NV_GROUP)
    skipped = fields.strings("ignore")
    patterns = (re.escape(name).replace(r"\*", ".*") + "$" for name in skipped if "*" in name)
    matched = layers.matching(fields, "ignore", patterns)
    return [StoredRule(None, matched, frozenset(skipped)), _rest(scheme)]


def _fp8_activations(group: Fields, width: int) -> Rounding:
    """Return how a config group quantises its inputs.

    Args:
        width: number of inputs that share a scale of the weights; 0: all of them.
    """
    if group.mapping("input_activations") is None:
        return "float"
    inputs = group.inside("input_activations")
    inputs.choice("type", ("float",), "int")
    inputs.integer("num_bits", 8, 8, 8)
    if not inputs.boolean("dynamic", False):
        inputs.choice("strategy", ("tensor",), "tensor")
        return "static"
    strategy = inputs.choice("strategy", ("tensor", "token", "group"), "tensor")
    if strategy != "group":
        return "token"  # one scale for all tokens of a step would make them depend on each other
    size = _group(inputs, "group_size")
    if size != width:
        raise inputs.error("group_size", f"must be that of the weights ({width}), not {size}")
    return "group"


def _strategy(weights: Fields) -> tuple[int, int]:
    """Return the numbers of outputs and of inputs that share a scale; 0: all of them."""
    size = weights.raw("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    match weights.choice("strategy", ("tensor", "channel", "group", "block"), default):
        case "tensor":
            return 0, 0
        case "channel":
            return 1, 0
        case "group":
            return 1, _group(weights, "group_size")
        case _:
            block = _block(weights, "block_structure")
            if block is None:
                raise weights.error("block_structure", "is missing")
            return block


def _group(fields: Fields, key: str, default: int | None = None) -> int:
    """Return the number of inputs of a group; 0: all of them, which the file gives as -1."""
    size = fields.integer(key, -1, MAX_GROUP, default)
    if size == 0:
        raise fields.error(key, "must be -1 or positive, not 0")
    return max(size, 0)


def _block(fields: Fields, key: str) -> tuple[int, int] | None:
    value = fields.raw(key)
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2:
        band, group = value
        if type(band) is type(group) is int and 0 < band <= MAX_GROUP and 0 < group <= MAX_GROUP:
            return band, group
    raise fields.error(key, f"must be two positive integers, not {shown(value)}")


def _chosen(fields: Fields, key: str) -> list[str]:
    """Return the names in a list, which may contain lists of names."""
    value = fields.raw(key)
    parts = [] if value is None else value
    if isinstance(parts, list):
        names = [name for part in parts for name in (part if isinstance(part, list) else [part])]
        if all(isinstance(name, str) for name in names):
            return names
    raise fields.error(key, f"must be lists of names, not {shown(value)}")


def _skipped(fields: Fields, *keys: str) -> StoredRule:
    """Return the rule that the head and the named layers are not quantised."""
    names = (name.strip(".") for key in keys for name in fields.strings(key))
    return StoredRule(None, within=frozenset({*HEADS, *names}))


def _rest(scheme: StoredScheme | None) -> StoredRule:
    """Return the rule for all other layers."""
    return StoredRule(scheme, every=True)


def _named(fields: Fields, key: str) -> frozenset[str]:
    """Return the targets of compressed-tensors that are names."""
    return frozenset(name for name in fields.strings(key) if not name.startswith(REGEX))


def _matched(fields: Fields, key: str, layers: _Layers) -> frozenset[str]:
    """Return the layers that the regular expressions among the targets select."""
    targets = (target for target in fields.strings(key) if target.startswith(REGEX))
    return layers.matching(fields, key, (target.removeprefix(REGEX) for target in targets))


def _bitnet(fields: Fields, layers: _Layers) -> list[StoredRule]:
    fields.choice("quantization_mode", ("offline",), "offline")
    if fields.boolean("use_rms_norm", False):
        raise fields.error("use_rms_norm", "must be false")
    layout = fields.choice("linear_class", TERNARY_LAYOUTS, DIVIDED)
    classes = {str(name): name for name in TERNARY_LAYOUTS}
    scheme = StoredScheme(classes[layout], 2, band=0, quantize_activations=True)
    return [_skipped(fields, "modules_to_not_convert"), _rest(scheme)]


METHODS: Mapping[str, Callable[[Fields, _Layers], list[StoredRule]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "bitnet": _bitnet,
}
