"""What a context of 128k costs: memory while a prompt of 100,000 tokens is prefilled in chunks, and
tokens a second of prefill and of decoding at each context, compared with the planner's predictions.

    python benchmarks/cpu/long_context.py
        [--models yarn longrope llama3 blocks entries pools unpooled]
        [--contexts 4096 8192 16384 32768 65536 100000] [--threads N] [--rounds 1]
        [--attention-backend NAME ...] [--calibration FILE] [--json FILE]

The model has random weights (2 layers of width 512, 8 query and 2 key/value heads of 64, bf16) and
a trained context stretched to 131,072 positions in each of three ways, or as in MiniMax-M3, where
KV heads read 16 blocks of 128 keys; or 8 layers of width 1024 as in DeepSeek V4, 8 heads of 512
over a window of 128 and entries of 4 tokens, of which 512 are chosen, or of 128; or 8 layers of
width 1024 as in GLM-5.3, two of which have latent attention, of 16 heads, over 128 chosen pools of
16 keys, or ("unpooled") over all keys. There is one process for each model and attention backend.
One text is prefilled up to each context, one after another: the earlier part is in the prefix
cache, so each token is computed once, in the engine's own chunks; at each context it decodes 32
tokens. Step times are the engine's own wall times, as in calibrations. Predictions are those of
`kvik plan`, with the calibration of this machine and its peak and read rates just before and after.

Columns: tokens a second of the chunks before each context, and of decoding there, each with
predicted over measured in brackets; resident memory, its peak since the previous context, and that
peak without keys and values. "!": other processes took more than 5 % of the cores.
"""

from __future__ import annotations

import json
import random
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from kvik_bench.scripts import fresh_processes, greedy, kibibytes

POSITIONS, CONTEXTS, STEPS = 131_072, (4096, 8192, 16_384, 32_768, 65_536, 100_000), 32
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": POSITIONS,
    "dtype": "bfloat16",
}
PAIRS = SIZES["head_dim"] // 2
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * PAIRS,
        "long_factor": [1.0 + 31.0 * i / (PAIRS - 1) for i in range(PAIRS)],
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
POOLS: dict[str, Any] = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    **{"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8},
    **{"num_attention_heads": 16, "kv_lora_rank": 512, "q_lora_rank": 512, "qk_rope_head_dim": 0},
    **{"qk_nope_head_dim": 128, "v_head_dim": 128, "linear_num_heads": 8, "linear_head_dim": 128},
    **{"moe_intermediate_size": 512, "n_routed_experts": 8, "num_experts_per_tok": 2},
    **{"index_n_heads": 16, "index_head_dim": 128, "index_kpool": 16, "index_topk": 2048},
    "max_position_embeddings": POSITIONS,
    "dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    **{
        name: {**SIZES, "rope_parameters": {"rope_theta": 500_000.0, **scaling}}
        for name, scaling in SCALINGS.items()
    },
    "blocks": {
        **SIZES,
        "architectures": ["MiniMaxM3VLForCausalLM"],
        "model_type": "minimax_m3_vl_text",
        "dense_intermediate_size": SIZES["intermediate_size"],
        "mlp_layer_types": ["dense"] * 2,
        "layer_types": ["minimax_m3_sparse"] * 2,
        "index_n_heads": SIZES["num_key_value_heads"],
        "index_head_dim": SIZES["head_dim"],
    },
    "entries": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        **{"vocab_size": 8192, "hidden_size": 1024, "num_hidden_layers": 8, "num_hash_layers": 1},
        **{"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 512},
        **{"qk_rope_head_dim": 64, "q_lora_rank": 512, "o_groups": 2, "o_lora_rank": 512},
        **{"moe_intermediate_size": 512, "n_routed_experts": 8, "num_experts_per_tok": 2},
        **{"index_n_heads": 16, "index_head_dim": 128, "index_topk": 512, "sliding_window": 128},
        "compress_ratios": [0, 128, *[4, 128] * 3],
        "max_position_embeddings": POSITIONS,
        "dtype": "bfloat16",
    },
    "pools": POOLS,
    "unpooled": {**POOLS, "index_topk": POSITIONS},
}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--attention-backend", nargs="+", default=["auto"], dest="backends")
    parser.add_argument("--calibration", type=Path, help="a saved one, in place of a new one")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as work:
        calibration = args.calibration or Path(work) / "calibration.json"
        if not args.calibration:
            from kvik_bench.machine.calibrate import calibrate_into

            calibrate_into(calibration, args.threads)
        for _ in range(args.rounds):
            for model in args.models:
                folder = Path(work) / model
                folder.mkdir(exist_ok=True)
                (folder / "config.json").write_text(json.dumps(MODELS[model]))
                for backend in args.backends:
                    asked = folder, args.contexts, calibration, backend
                    (rows,) = fresh_processes(measure, asked)
                    title = model if backend == "auto" else f"{model}, {backend}"
                    found.setdefault(title, []).extend(rows)
                    report(title, rows)
        if args.rounds > 1:
            for model, rows in found.items():
                report(f"{model}, medians of {args.rounds} rounds", medians(rows))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each context."""
    found = []
    for context in dict.fromkeys(row["context"] for row in rows):
        alike = [row for row in rows if row["context"] == context]
        numbers = [name for name, value in alike[0].items() if isinstance(value, int | float)]
        found.append({name: median(row[name] for row in alike) for name in numbers})
    return found


def report(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n{'context':>8}{'prompt tok/s':>18}{'decode tok/s':>18}{'MiB':>8}{'peak':>8}")
    for row in rows:
        ratios = [row[f"{kind}_predicted"] / row[kind] for kind in ("prompt", "decode")]
        print(
            f"{row['context']:8}{row['prompt']:11.0f} ({ratios[0]:.2f})"
            f"{row['decode']:11.1f} ({ratios[1]:.2f}){row['resident'] / 2**20:8.1f}"
            f"{row['peak'] / 2**20:8.1f}{(row['peak'] - row['kv']) / 2**20:8.1f}"
            f"{' !' if row['others'] > 0.05 else ''}",
            flush=True,
        )


def measure(
    folder: Path, contexts: list[int], calibration: Path, backend: str
) -> list[dict[str, Any]]:
    """In a separate process: return a row for each context."""
    from kvik.config.config import EngineConfig
    from kvik.config.hardware import detect
    from kvik.core.types import EngineRequest
    from kvik.engine.loop import LoopObserver
    from kvik.launch import load_loop, resolve_config
    from kvik.planner.calibration import ReadRate, load
    from kvik.planner.devices import Setting, cpu_device
    from kvik.planner.families import read_shape
    from kvik.planner.formats import weight_format
    from kvik.planner.roofline import decode, prefill, step_time
    from kvik_bench.inprocess.rounds import Watch
    from kvik_bench.machine.calibrate import make_stage, speeds_now
    from kvik_bench.machine.stage import FULL

    facts = load(calibration)
    threads = facts.machine.threads
    kernels = "torch" if facts.machine.kernels == "torch" else "native"
    shape = replace(read_shape(str(folder)), kernels=kernels)
    resolved = resolve_config(
        EngineConfig(
            str(folder),
            load_format="random",
            device="cpu",
            dtype="bfloat16",
            attention_backend=backend,
            threads=threads,
            max_num_seqs=1,
            max_model_len=POSITIONS,
        )
    )
    limits = make_stage(detect(), threads, FULL).limits
    form = weight_format(resolved.runner.dtype, "none")
    loop = load_loop(resolved)
    steps: list[tuple[int, float]] = []  # tokens and seconds of each step

    class Times(LoopObserver):
        def planned(self, plan: Any, now: float) -> None:
            if plan is not None:
                self.tokens = plan.num_tokens

        def finished(self, output: Any, now: float) -> None:
            steps.append((self.tokens, output.seconds))

    loop.watch(Times())
    dice = random.Random(0)
    text = [dice.randrange(3, 8192) for _ in range(max(contexts))]

    def run(length: int, output: int) -> None:
        loop.add(EngineRequest(f"{length} {output}", text[:length], greedy(output)))
        while loop.has_work:
            loop.step()

    run(256, 8)
    speeds_now(limits, facts)
    rows = []
    each = sum(group.bytes_per_token for group in resolved.cache.groups)
    for context in contexts:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        steps.clear()
        before, watch = speeds_now(limits, facts), Watch()
        run(context, STEPS + 1)
        others = watch.others()
        *rates, speed = (
            sum(pair) / 2 for pair in zip(before, speeds_now(limits, facts), strict=True)
        )
        reads = tuple(ReadRate(r.bytes, rate) for r, rate in zip(facts.reads, rates, strict=True))
        at = Setting(cpu_device(facts.at(reads, speed), facts.machine, 0), form, "bf16")
        chunks = [step for step in steps if step[0] > 1]
        decoding = [seconds for tokens, seconds in steps if tokens == 1]
        new = sum(tokens for tokens, _ in chunks)
        cached, expected = context - new, 0.0
        for tokens, _ in chunks:
            expected += step_time(shape, at, prefill(tokens, cached)).expected
            cached += tokens
        step = decode(1, context + STEPS // 2)
        rows.append(
            {
                "context": context,
                "prompt": new / sum(seconds for _, seconds in chunks),
                "prompt_predicted": new / expected,
                "decode": 1 / median(decoding),
                "decode_predicted": 1 / step_time(shape, at, step).expected,
                "resident": kibibytes("self", "VmRSS") * 1024,
                "peak": kibibytes("self", "VmHWM") * 1024,
                "kv": each * (context + STEPS),
                "others": others,
                "speed": speed,
                "parts": {
                    part.name: part.expected
                    for part in step_time(shape, at, prefill(chunks[-1][0], cached)).parts
                },
                "last_chunk": chunks[-1],
            }
        )
    loop.close()
    return rows


if __name__ == "__main__":
    main()
