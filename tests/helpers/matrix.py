"""Configurations of an engine that must all produce the same tokens, and how to run them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from helpers.adapters import draw_pairs, linear_layers, write_adapter
from helpers.configs import config as model_config
from helpers.overlapping import steps_in_flight
from helpers.page_moves import load_always
from helpers.served_columns import (
    make_requests,
    serve_by_peers,
    serve_here,
    serve_in_threads,
    serve_moved,
    serve_recorded,
)

from kvik import LLM, SamplingParams
from kvik.config.compute import LANES
from kvik.config.config import EngineConfig
from kvik.core.structured import CHECKED, Constraint
from kvik.engine.output import RequestOutput
from kvik.engine.stats import EngineStats
from kvik.launch import resolve_config

NUM_TOKENS = 12  # most requests begin another block of 16 and leave a window of 24
CONTEXT = 128


@dataclass(frozen=True)
class Column:
    """One configuration.

    Attributes:
        config: engine options.
        rounds: number of runs of the whole batch; the last one counts (prefix hits).
        order: "given", "reversed" or "shuffled" arrival.
        alone: one request at a time.
        siblings: n > 1; all siblings of a greedy request must agree.
        way: by `LLM`, or as servers do: "requests" in this thread, over the "wire",
            by two "replicas", by two "peers", "moved" from one to another, or "recorded".
        tenants: that share the engine; not by `LLM`.
        pinned: tenants pin their prompts; not by `LLM`.
        in_flight: steps at a time, although a CPU computes one after the other.
        loaded: adapters are loaded while the engine runs.
        must: features that the last round must have used, so that no column passes without its own.
    """

    name: str
    config: dict[str, object] = field(default_factory=dict)
    rounds: int = 1
    order: str = "given"
    alone: bool = False
    siblings: int = 1
    way: str = "LLM"
    tenants: int = 1
    pinned: bool = False
    in_flight: int = 1
    loaded: bool = False
    must: str = ""

    @property
    def native(self) -> bool:
        """Whether attention runs in the native kernels."""
        chosen = self.config.keys() & {"kernels", "attention_backend"}
        return not chosen and self.config.get("block_size", LANES) % LANES == 0


TWO = {"tensor_parallel_size": 2, "threads": 2}
STAGES = {"pipeline_parallel_size": 2, "threads": 2}
BOTH = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "threads": 4}
SQUEEZED = {"num_blocks": 12, "block_size": 16}  # blocks of each KV group
MEMORY_TIER = {"kv_tiers": "memory:64MiB"}
DISK_TIER = {"kv_tiers": "disk:{folder}:1GiB"}
TIGHT = {**SQUEEZED, **MEMORY_TIER, "max_num_seqs": 2}  # prompts leave the cache between rounds
COLUMNS = [
    Column("batch"),
    Column("prefixes that arrive together", must="hits"),
    Column("torch", {"kernels": "torch"}),
    Column("reference attention", {"attention_backend": "reference"}),
    Column("sdpa", {"attention_backend": "sdpa"}),
    Column("one at a time", alone=True),
    Column("chunks of 5", {"max_num_batched_tokens": 5, "max_num_seqs": 5}),
    Column("chunks of 16", {"max_num_batched_tokens": 16, "max_num_seqs": 8}),
    Column("chunks of 33", {"max_num_batched_tokens": 33}),
    Column("prefix hits", rounds=2, must="hits"),
    Column("prefix hits, chunks", {"max_num_batched_tokens": 16}, rounds=2, must="hits"),
    Column("no prefix cache", {"enable_prefix_caching": False}, rounds=2),
    Column("preemption", SQUEEZED, must="preemptions"),
    Column(
        "preemption without cache", {**SQUEEZED, "enable_prefix_caching": False}, must="preemptions"
    ),
    Column("preemption, chunks", {**SQUEEZED, "max_num_batched_tokens": 16}, must="preemptions"),
    Column("memory tier", TIGHT, rounds=2, must="loads"),
    Column(
        "memory tier, chunks, two steps in flight",
        {**TIGHT, "max_num_batched_tokens": 16},
        rounds=2,
        in_flight=2,
        must="loads",
    ),
    Column("disk tier", {**TIGHT, **DISK_TIER}, rounds=2, must="loads"),
    Column(
        "memory and disk tiers, chunks, siblings",
        {**TIGHT, "kv_tiers": "memory:1MiB,disk:{folder}:1GiB", "max_num_batched_tokens": 33},
        rounds=2,
        siblings=2,
        must="loads",
    ),
    Column("swap to the disk", {**SQUEEZED, **DISK_TIER}, must="preemptions"),
    Column("swap", {**SQUEEZED, **MEMORY_TIER}, must="swaps"),
    Column(
        "swap, siblings, three steps in flight",
        {**SQUEEZED, **MEMORY_TIER, "num_blocks": 15},
        siblings=2,
        in_flight=3,
        must="swaps",
    ),
    Column("two at a time", {"max_num_seqs": 2}),
    Column("blocks of 1", {"block_size": 1}, rounds=2, must="hits"),
    Column("blocks of 8", {"block_size": 8}, rounds=2, must="hits"),
    Column("blocks of 32", {"block_size": 32}, rounds=2, must="hits"),
    Column("blocks of 64", {"block_size": 64}, rounds=2, must="hits"),
    Column("reversed arrival", order="reversed"),
    Column("shuffled arrival", {"max_num_seqs": 3}, order="shuffled"),
    Column("two threads", {"threads": 2}),
    Column("siblings", siblings=3),
    Column("siblings, preemption", {**SQUEEZED, "num_blocks": 15}, siblings=2, must="preemptions"),
    Column("two steps in flight", in_flight=2),
    Column(
        "two steps in flight, preemption, chunks",
        {**SQUEEZED, "max_num_batched_tokens": 16},
        in_flight=2,
        must="preemptions",
    ),
    Column("three steps in flight, siblings", siblings=3, rounds=2, in_flight=3, must="hits"),
    Column("priority", {"policy": "priority"}),
    Column("shortest-prefill-first", {"policy": "shortest-prefill-first", "max_num_seqs": 2}),
    Column("longest-prefix-match", {"policy": "longest-prefix-match", "max_num_seqs": 2}, rounds=2),
    Column("static", {"policy": "static", "batch_size": 3}),
    Column("dynamic", {"policy": "dynamic", "batch_size": 3, "max_wait": 0.01}),
]
PEERS = Column("roles", way="peers", must="fetched")
MOVED = Column("moved", way="moved", must="fetched", siblings=2)
REPLICA = Column("replica", rounds=2, way="replicas", tenants=2, must="hits")
SERVED = [
    REPLICA,
    PEERS,
    MOVED,
    Column("wire", way="wire"),
    Column("wire, preemption", SQUEEZED, way="wire", must="preemptions"),
    Column("tenants", {"max_num_seqs": 3}, way="requests", tenants=3),
    Column("tenants, preemption", SQUEEZED, way="requests", tenants=4, must="preemptions"),
    Column("pins", rounds=2, way="requests", tenants=2, pinned=True, must="pins"),
    Column("recorded", {"max_num_seqs": 4}, siblings=2, way="recorded"),
]
ALL_OF_IT = Column(  # all features of a server at once
    "wire, tenants, pins, preemption, two steps in flight",
    {**SQUEEZED, "max_num_batched_tokens": 33},
    rounds=2,
    way="wire",
    in_flight=2,
    tenants=3,
    pinned=True,
    must="preemptions",
)
ALL_COLUMNS = [*COLUMNS, *SERVED, ALL_OF_IT]


def by_name(columns: Sequence[Column], *names: str) -> list[Column]:
    """Return the columns with these names, all of which must exist, in their own order."""
    found = [column for column in columns if column.name in names]
    missing = {*names} - {column.name for column in found}
    assert not missing, missing
    return found


LATENT_COLUMNS = by_name(
    COLUMNS, "two threads", "swap to the disk", "prefix hits, chunks", "preemption, chunks"
)

BUNDLED = ""
# Two layers that see 24 keys need the memory of one that sees all, which has larger heads: two KV
# groups. The last two layers read the keys of others. All have experts.
WINDOWED = model_config(
    "Gemma4ForCausalLM",
    vocab=96, hidden=32, inner=64, layers=5, heads=4, kv_heads=2, head_dim=16, positions=256,
    layer_types=["sliding_attention" if kind == "s" else "full_attention" for kind in "ssfsf"],
    num_kv_shared_layers=2, global_head_dim=32, num_global_key_value_heads=2,
    attention_k_eq_v=True, hidden_size_per_layer_input=32, enable_moe_block=True, num_experts=6,
    top_k_experts=2, moe_intermediate_size=32, sliding_window=24, torch_dtype="float32",
)  # fmt: skip
CAPPED = {  # layers alternate with and without a window; scores and logits are capped
    **WINDOWED,
    "architectures": ["Gemma2ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": None,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 2.0,
}

CHUNKED = {  # layers that see chunks of 72 keys, and layers without positions; experts in two
    **WINDOWED,
    "architectures": ["Llama4ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": None,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 72,
    "floor_scale": 16,
}

NARROW = model_config(  # values narrower than keys; windows with learned sinks, and no windows
    "MiMoV2FlashForCausalLM",
    vocab=96, hidden=32, inner=64, layers=4, heads=4, kv_heads=1, head_dim=32, positions=256,
    layer_types=["full_attention" if kind == "f" else "sliding_attention" for kind in "fssf"],
    v_head_dim=16, sliding_window=24, partial_rotary_factor=0.5, moe_intermediate_size=32,
    n_routed_experts=6, num_experts_per_tok=2, torch_dtype="float32",
)  # fmt: skip

ALIBI = {  # a number of heads that is no power of two, and no positions but those
    **{"architectures": ["BloomForCausalLM"], "vocab_size": 96, "hidden_size": 48, "n_layer": 3},
    **{"n_head": 3, "seq_length": 256, "torch_dtype": "float32"},
}

LATENT = model_config(  # attention over latent vectors, an MLP and then experts
    "DeepseekV3ForCausalLM",
    vocab=96, hidden=64, inner=96, layers=3, heads=4, kv_heads=4, positions=256, q_lora_rank=32,
    kv_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20,
    first_k_dense_replace=1, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3,
    n_group=2, topk_group=1, torch_dtype="float32",
)  # fmt: skip

GPT_OSS = model_config(  # learned sinks in all layers, windows in every second; experts
    "GptOssForCausalLM",
    vocab=96, hidden=32, inner=32, layers=4, heads=4, kv_heads=2, head_dim=16, positions=256,
    layer_types=["full_attention" if kind == "f" else "sliding_attention" for kind in "sfsf"],
    sliding_window=24, num_local_experts=4, num_experts_per_tok=2, torch_dtype="float32",
)  # fmt: skip

STATES = model_config(  # a delta net, attention, a delta net
    "Qwen3_5ForCausalLM",
    vocab=96, hidden=32, inner=64, layers=3, heads=4, kv_heads=2, head_dim=16, positions=256,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=12, torch_dtype="float32",
)  # fmt: skip

SPACES = model_config(  # Mamba-2, experts, attention, Mamba-2, an MLP
    "NemotronHForCausalLM",
    vocab=96, hidden=32, inner=64, layers=5, heads=4, kv_heads=2, head_dim=16, positions=256,
    hybrid_override_pattern="ME*M-", mamba_num_heads=4, mamba_head_dim=12, n_groups=2,
    ssm_state_size=8, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=32, torch_dtype="float32",
)  # fmt: skip

ROWS = model_config(  # delta nets whose states' rows decay by their own gates; latent attention
    "KimiLinearForCausalLM",
    vocab=96, hidden=32, inner=64, layers=3, heads=4, kv_heads=4, positions=256,
    model_max_length=256, kv_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20,
    layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_heads=3,
    linear_head_dim=12, moe_intermediate_size=32, num_experts=8, num_experts_per_token=3,
    num_expert_group=2, topk_group=1, torch_dtype="float32",
)  # fmt: skip
INDEXED = {  # the same, over the keys that an indexer or the layer before has chosen
    **LATENT,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "index_n_heads": 6,
    "index_head_dim": 24,
    "index_topk": 20,
    "indexer_types": ["full", "shared", "full"],
}

STREAMS = {  # the same over several residual streams, with sinks and gates
    **INDEXED,
    "architectures": ["HYV4ForCausalLM"],
    "hc_mult": 3,
    "learnable_sink_init": 0.5,
}
ENTRIES = model_config(  # windows, and entries that sum up tokens; some experts by the token
    "DeepseekV4ForCausalLM",
    vocab=96, hidden=32, inner=32, layers=3, heads=4, kv_heads=1, head_dim=16, positions=256,
    qk_rope_head_dim=8, q_lora_rank=24, o_groups=2, o_lora_rank=12, moe_intermediate_size=24,
    n_routed_experts=6, num_experts_per_tok=3, sliding_window=24, num_hash_layers=1, index_topk=6,
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 20},
    layer_types=[
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
    ],
    index_n_heads=8, index_head_dim=16, torch_dtype="float32",
)  # fmt: skip
POOLS = model_config(  # states, and latent vectors in pools that an indexer chooses
    "Glm5NextForConditionalGeneration",
    vocab=96, hidden=32, inner=32, layers=4, heads=4, kv_heads=4, positions=256,
    kv_lora_rank=32, q_lora_rank=24, qk_rope_head_dim=0, qk_nope_head_dim=16, v_head_dim=16,
    linear_num_heads=2, linear_head_dim=16, moe_intermediate_size=24, n_routed_experts=6,
    num_experts_per_tok=3, index_n_heads=4, index_head_dim=16, index_topk=12, index_kpool=4,
    layer_types=["linear_attention", "indexed_attention"] * 2, hc_mult=2, torch_dtype="float32",
    mlp_layer_types=["dense", *["sparse"] * 3], indexer_types=["full", "full", "full", "shared"],
)  # fmt: skip
BLOCKS = model_config(  # blocks of keys that KV heads choose; an MLP, then experts
    "MiniMaxM3VLForCausalLM",
    vocab=96, hidden=64, inner=32, layers=3, heads=4, kv_heads=2, head_dim=32, positions=256,
    rotary_dim=16, dense_intermediate_size=96, shared_intermediate_size=32, num_local_experts=6,
    num_experts_per_tok=2, index_n_heads=2, index_head_dim=32, index_block_size=8,
    index_topk_blocks=3, layer_types=["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
    mlp_layer_types=["dense", "sparse", "sparse"], torch_dtype="float32",
)  # fmt: skip

BESIDE = model_config(  # attention and Mamba-2 in each layer
    "FalconH1ForCausalLM",
    vocab=96, hidden=32, inner=64, layers=3, heads=4, kv_heads=2, head_dim=16, positions=256,
    mamba_d_ssm=48, mamba_n_heads=4, mamba_d_state=8, mamba_n_groups=2, key_multiplier=0.5,
    ssm_multipliers=[0.4, 0.3, 0.7, 0.5, 1.4], torch_dtype="float32",
)  # fmt: skip

CHANNELS = model_config(  # Mamba, attention, Mamba; experts, an MLP, experts
    "JambaForCausalLM",
    vocab=96, hidden=32, inner=32, layers=3, heads=4, kv_heads=2, head_dim=16, positions=256,
    attn_layer_period=3, attn_layer_offset=1, expert_layer_offset=0, num_experts=6,
    num_experts_per_tok=2, mamba_d_state=12, torch_dtype="float32",
)  # fmt: skip

PURE = {  # Mamba-2 in every layer
    **{"architectures": ["Mamba2ForCausalLM"], "vocab_size": 96, "hidden_size": 32},
    **{"num_hidden_layers": 3, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2},
    **{"max_position_embeddings": 256, "torch_dtype": "float32"},
}

DECAYS = model_config(  # lightning attention, full attention, lightning attention; experts
    "MiniMaxForCausalLM",
    vocab=96, hidden=32, inner=32, layers=3, heads=4, kv_heads=2, head_dim=16, positions=256,
    layer_types=["linear_attention", "full_attention", "linear_attention"], num_local_experts=6,
    num_experts_per_tok=2, linear_attn_alpha_factor=1.5, torch_dtype="float32",
)  # fmt: skip

TURNS = model_config(  # Mamba-2, and attention that layers share, which read the token's embedding
    "Zamba2ForCausalLM",
    vocab=96, hidden=32, inner=64, layers=4, heads=4, kv_heads=4, positions=256, hidden_act="gelu",
    layers_block_type=["hybrid", "mamba", "hybrid", "hybrid"], num_mem_blocks=2, adapter_rank=4,
    use_shared_attention_adapter=True, n_mamba_heads=4, mamba_d_state=8, torch_dtype="float32",
)  # fmt: skip

SHORTCUTS = model_config(  # latent attention twice in a block; experts that return their input
    "LongcatFlashForCausalLM",
    vocab=96, hidden=64, inner=96, layers=2, heads=4, kv_heads=4, positions=256, num_layers=2,
    ffn_hidden_size=96, q_lora_rank=32, kv_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=24,
    v_head_dim=20, expert_ffn_hidden_size=32, n_routed_experts=6, zero_expert_num=4, moe_topk=4,
    torch_dtype="float32",
)  # fmt: skip

MODELS = (
    "bundled",
    "windowed",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("chunked", "capped")),
)


def make_model(name: str, folder: Path) -> dict[str, object]:
    """Return engine options for a model; after "adapted ", with adapters for requests.

    Args:
        folder: an empty one, for files of the model.
    """
    if name.startswith("adapted "):
        made = make_model(name.removeprefix("adapted ").removesuffix(" experts"), folder)
        spec = resolve_config(EngineConfig(**made)).model
        layers = linear_layers(spec)
        some = {layer: size for i, (layer, size) in enumerate(layers.items()) if i % 3}
        if name.endswith(" experts"):  # those of one adapter are also changed
            layers |= linear_layers(spec, experts=True)
        adapters = {
            "small": write_adapter(folder / "small", draw_pairs(some, rank=2)),
            "large": write_adapter(folder / "large", draw_pairs(layers, rank=7, seed=1)),
        }
        return {**made, "adapters": adapters}
    if name == "bundled":
        return {"model": BUNDLED}
    configs = {"latent": LATENT, "capped": CAPPED, "chunked": CHUNKED, "states": STATES}
    configs |= {"spaces": SPACES, "beside": BESIDE, "rows": ROWS, "indexed": INDEXED}
    configs |= {"pure": PURE, "channels": CHANNELS, "narrow": NARROW, "gpt-oss": GPT_OSS}
    configs |= {"alibi": ALIBI, "streams": STREAMS, "blocks": BLOCKS}
    configs |= {"entries": ENTRIES, "pools": POOLS}
    configs |= {"decays": DECAYS, "turns": TURNS, "shortcuts": SHORTCUTS}
    config = configs.get(name, WINDOWED)
    (folder / "config.json").write_text(json.dumps(config))
    return {"model": str(folder), "load_format": "random", "seed": 3}


def prompts(vocab: int) -> list[list[int]]:
    """Return short and long prompts, some with a common prefix, one of a single token."""
    rng = random.Random(0)
    shared = [rng.randrange(5, vocab) for _ in range(40)]
    fresh = [[rng.randrange(5, vocab) for _ in range(n)] for n in (1, 7, 31, 32, 33, 90)]
    return [*fresh, [*shared, 11], [*shared, 12, 13], shared[:32], [*shared, 11, 12, 13, 14]]


# A forced text, then one with a choice at each token, longer than any answer.
OBJECT = Constraint(
    CHECKED,
    json.dumps(
        {"grammars": [{"lark_grammar": r'start: "{\"name\": \"" /[a-zA-Z ,.\']{200,400}/ "\"}"'}]}
    ),
)


def params(siblings: int = 1) -> list[SamplingParams]:
    """Return greedy parameters for most, seeded sampling with all options for the others, and a
    beam search; two texts are structured."""
    common = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "n": siblings}
    greedy = SamplingParams(temperature=0.0, **common)
    seeded = SamplingParams(
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        seed=1234,
        **common,
    )
    structured = greedy.with_changes(structured=OBJECT)
    drawn = seeded.with_changes(structured=OBJECT)
    beams = SamplingParams(num_beams=3, **{**common, "max_tokens": 5})  # also begins a block
    return [structured, greedy, greedy, greedy, greedy, greedy, seeded, greedy, drawn, beams]


def possible(sampling: list[SamplingParams], model: dict[str, object]) -> list[SamplingParams]:
    """Return the parameters that the model supports; structured texts need a tokenizer. Requests
    have the model's adapters in turn, or none."""
    adapters = ["", *model.get("adapters", ())]
    sampling = [
        one.with_changes(adapter=adapters[i % len(adapters)]) for i, one in enumerate(sampling)
    ]
    if model["model"] == BUNDLED:
        return sampling
    return [one.with_changes(structured=None) for one in sampling]


def run(llm: LLM, column: Column, sampling: list[SamplingParams]) -> list[RequestOutput]:
    """Return the outputs of the last round, by prompt."""
    jobs = list(zip(prompts(llm.resolved.model.vocab_size), sampling, strict=True))
    order = list(range(len(jobs)))
    if column.order == "reversed":
        order.reverse()
    elif column.order == "shuffled":
        random.Random(1).shuffle(order)
    batches = [[i] for i in order] if column.alone else [order]
    found: dict[int, RequestOutput] = {}
    for _ in range(column.rounds):
        for batch in batches:
            outputs = llm.generate([jobs[i][0] for i in batch], [jobs[i][1] for i in batch])
            for i, output in zip(batch, outputs, strict=True):
                errors = {c.error for c in output.outputs}
                assert errors == {None}, errors
                found[i] = output
    return [found[i] for i in range(len(jobs))]


def run_column(
    column: Column, sampling: list[SamplingParams], model: dict[str, object], **options: object
) -> list[RequestOutput]:
    """Run a column in its own engine, and check that it used the column's feature."""
    config = {"threads": 1, "max_model_len": CONTEXT, "max_num_seqs": 16, **column.config}
    if "num_blocks" in config:
        config["num_blocks"] *= len(resolve_config(EngineConfig(**model)).cache.groups)
    config = {**model, "device": "cpu", **config, **options}
    sampling = possible(sampling, model)
    loaded = config.pop("adapters") if column.loaded else {}
    with (
        TemporaryDirectory() as folder,
        steps_in_flight(column.in_flight) as copies,
        pytest.MonkeyPatch.context() as patch,
    ):
        load_always(patch)  # whether that is faster depends on the machine
        if "kv_tiers" in config:
            config["kv_tiers"] = config["kv_tiers"].format(folder=folder)
        if column.way == "LLM":
            with LLM(**config) as llm:
                for name, path in loaded.items():
                    llm.load_adapter(name, path)
                found = run(llm, column, sampling)
                stats, budget = llm.stats(), llm.resolved.scheduler.max_num_batched_tokens
        else:
            found, stats = _serve(column, sampling, EngineConfig(**config))
            budget = config.get("max_num_batched_tokens", 0)
    # A mask needs the previous token, so a step with structured texts waits for the previous step.
    free = not any(one.structured for one in sampling)
    if column.in_flight > 1 and free and not config.keys() & {"spec_method", "speculative_config"}:
        assert [one.most_unread >= column.in_flight for one in copies] == [True]
    if column.must == "pins":
        assert stats.pinned_blocks and any(output.num_cached_tokens for output in found)
    if column.must == "hits":
        assert any(output.num_cached_tokens for output in found)
    if column.must == "loads":
        assert stats.moves.totals.loaded_tokens
    if column.must == "fetched":
        (peer,) = stats.moves.tiers
        assert peer.loaded and not peer.failed, peer
    if column.must == "swaps":
        assert stats.moves.totals.swapped_in and stats.moves.totals.swapped_out
    if column.must in ("preemptions", "swaps"):
        assert any(output.num_preemptions for output in found)
    if "max_num_batched_tokens" in column.config:
        assert budget < max(len(output.prompt_token_ids) for output in found)
    if not column.alone and column.config.get("max_num_seqs", 16) > 1:
        assert stats.steps < stats.rows  # requests shared steps
    assert stats.kv_usage == 0
    return found


def _serve(
    column: Column, sampling: list[SamplingParams], config: EngineConfig
) -> tuple[list[RequestOutput], EngineStats]:
    vocab = resolve_config(config).model.vocab_size
    rounds = make_requests(
        prompts(vocab),
        sampling,
        rounds=column.rounds,
        tenants=column.tenants,
        pinned=column.pinned,
    )
    if column.way == "replicas":
        found, stats = serve_in_threads(config, rounds, 2)
    elif column.way == "peers":
        found, stats = serve_by_peers(config, rounds)
    elif column.way == "moved":
        found, stats = serve_moved(config, rounds)
    elif column.way == "wire":
        found, stats = serve_in_threads(config, rounds)
    elif column.way == "recorded":
        with TemporaryDirectory() as folder:
            found, stats = serve_recorded(config, rounds, Path(folder) / "flight")
    else:
        found, stats = serve_here(config, rounds)
    assert {c.error for output in found for c in output.outputs} == {None}
    return found, stats


def reference_tokens(model: dict[str, object]) -> list[list[int]]:
    """Return the tokens of a plain run in fp32, one request at a time."""
    with LLM(
        **model,
        dtype="float32",
        device="cpu",
        threads=1,
        max_model_len=CONTEXT,
        kernels="torch",
        attention_backend="reference",
        enable_prefix_caching=False,
        max_num_seqs=1,
    ) as llm:
        outputs = run(llm, Column("reference", alone=True), possible(params(), model))
        return [output.outputs[0].token_ids for output in outputs]


FORMATS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    **{
        name: {"dtype": "bfloat16", "quantization": name}
        for name in ("int8", "int8-weight-only", "int4", "mxfp4", "fp8")
    },
    "KV in fp8": {"dtype": "float32", "kv_cache_dtype": "fp8"},
    "KV in int8": {
        "dtype": "bfloat16",
        "kv_cache_dtype": "int8",
        "kv_cache_dtype_skip_layers": (1,),
    },
    "KV in int4": {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int4"},
}
# Policies only reorder.
BITS = [
    c for c in [*COLUMNS, REPLICA, PEERS, MOVED, ALL_OF_IT] if c.native and "policy" not in c.config
]


def of_bits(columns: Sequence[Column]) -> list[Column]:
    """Return the columns that are among `BITS`, if with other options."""
    names = {column.name for column in BITS}
    return [column for column in columns if column.name in names]


# Columns that are also run without logprobs, for which whole prompts are computed.
WITHOUT_LOGPROBS = (
    *("batch", "one at a time", "chunks of 5", "prefix hits, chunks", "preemption, chunks"),
    *("memory and disk tiers, chunks, siblings", "swap, siblings, three steps in flight"),
    *("two threads", "siblings", "replica", "moved", ALL_OF_IT.name),
)


def by_tier(columns: Sequence[Column], fast: Sequence[Column] | None = None) -> list[object]:
    """Return the columns for a comparison of tokens, with the marks of their tiers.

    Columns whose log probabilities are also compared, which shows more, run only at night.

    Args:
        fast: columns of the fast tier; None: all.
    """
    contained = [c for c in of_bits(columns) if c.name not in WITHOUT_LOGPROBS]

    def marks(column: Column) -> tuple[pytest.MarkDecorator, ...]:
        if column in contained:
            return (pytest.mark.nightly,)
        return () if fast is None or column in fast else (pytest.mark.full,)

    return [pytest.param(column, marks=marks(column)) for column in columns]


def named(column: object) -> object:
    return getattr(column, "name", column)


def params_with_logprobs(siblings: int = 1) -> list[SamplingParams]:
    """Return `params` with logprobs, every other one also with prompt logprobs from some token on,
    for which that part of the prompt is computed."""
    return [
        one.with_changes(logprobs=3)
        if i % 2
        else one.with_changes(logprobs=3, prompt_logprobs=2, prompt_logprobs_start=i)
        for i, one in enumerate(params(siblings))
    ]


def reference_outputs(model: dict[str, object]) -> list[RequestOutput]:
    """Return outputs with logprobs by native kernels, one request at a time."""
    common = {"device": "cpu", "threads": 1, "max_model_len": CONTEXT}
    with LLM(**model, **common, enable_prefix_caching=False, max_num_seqs=1) as llm:
        runner = llm.resolved.runner
        assert (runner.kernels, runner.attention_backend) == ("native", "cpu")
        return run(llm, Column("reference", alone=True), possible(params_with_logprobs(), model))


@cache
def tokens_of(name: str) -> list[list[int]]:
    with TemporaryDirectory() as folder:
        return reference_tokens(make_model(name, Path(folder)))


@cache
def outputs_of(name: str, format: str) -> list[RequestOutput]:
    with TemporaryDirectory() as folder:
        return reference_outputs({**make_model(name, Path(folder)), **FORMATS[format]})


def check_tokens(outputs: list[RequestOutput], expected: list[list[int]]) -> None:
    """Check the tokens; greedy siblings have the same, sampled ones differ."""
    for i, (output, right, sampling) in enumerate(zip(outputs, expected, params(), strict=True)):
        found = [completion.token_ids for completion in output.outputs]
        assert found[0] == right, f"prompt {i}"
        if sampling.greedy:
            assert all(tokens == right for tokens in found), f"siblings of prompt {i}"
        else:
            assert len(set(map(tuple, found))) == len(found), "siblings drew the same"


def check_bits(outputs: list[RequestOutput], alone: list[RequestOutput]) -> None:
    """Check that log probabilities equal those of a request alone. Of sampled siblings only the
    first is compared, as each has its own seed."""
    for i, (output, right, sampling) in enumerate(zip(outputs, alone, params(), strict=True)):
        assert output.prompt_logprobs == right.prompt_logprobs, f"prompt {i}"
        for completion in output.outputs if sampling.greedy else output.outputs[:1]:
            assert completion.token_ids == right.outputs[0].token_ids, f"prompt {i}"
            assert completion.logprobs == right.outputs[0].logprobs, f"prompt {i}"
            assert len(completion.logprobs) == sampling.max_tokens


def checked_tokens(
    column: Column, model: dict[str, object], expected: list[list[int]], **options: object
) -> list[RequestOutput]:
    """Run a column in fp32, and check its tokens."""
    outputs = run_column(column, params(column.siblings), model, dtype="float32", **options)
    check_tokens(outputs, expected)
    return outputs


def checked_bits(
    column: Column,
    model: dict[str, object],
    format: str,
    alone: list[RequestOutput],
    **options: object,
) -> list[RequestOutput]:
    """Run a column in one of `FORMATS`, and check its log probabilities."""
    sampling = params_with_logprobs(column.siblings)
    outputs = run_column(column, sampling, {**model, **FORMATS[format]}, **options)
    check_bits(outputs, alone)
    return outputs


def checked_beside(column: Column, model: dict[str, object], alone: list[RequestOutput]) -> None:
    """Run a column in bfloat16 and check its log probabilities; if its attention is not native,
    check its tokens in fp32.

    Args:
        alone: outputs in bfloat16 of one request at a time.
    """
    if column.native:
        checked_bits(column, model, "bfloat16", alone)
    else:
        checked_tokens(column, model, reference_tokens(model))
