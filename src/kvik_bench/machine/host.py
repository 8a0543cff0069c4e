"""What the engine itself costs in a step: scheduling, batch tables, sampling's bookkeeping, text.

Measured on a network too small to matter, whose few kernels are known and taken off. Between steps
memory is read, because a model's weights drive the engine's own code and data out of the caches.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from kvik.config.config import EngineConfig
from kvik.config.model_source import find_model
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest
from kvik.engine.output import OutputProcessor
from kvik.launch import launch
from kvik.planner.calibration import Calibration, HostCost, Machine
from kvik.planner.devices import Device, Setting
from kvik.planner.families import read_shape
from kvik.planner.roofline import Step, decode, prefill, step_time
from kvik_bench.inprocess.rounds import undisturbed
from kvik_bench.machine.effort import Effort
from kvik_bench.machine.stage import Limits

PROMPT, PROMPTS = 16, (16, 512)  # tokens, when steps are timed and when prompts are
NETWORK = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def measure_host(measured: Calibration, limits: Limits, effort: Effort) -> Calibration:
    """The calibration with the engine's own costs, of which it had none."""
    with tempfile.TemporaryDirectory(prefix="kvik-") as name:
        folder = Path(name)
        vocab = _write(folder)
        shape = read_shape(name)
        device = Device("this", "cpu", 0, measured.bandwidth, measured.peaks, calibration=measured)

        def kernels(step: Step) -> float:
            return step_time(shape, Setting(device, "bf16", "bf16"), step).expected

        engine = _Engine(folder, vocab, measured.machine, effort, limits)
        try:
            hosts = []
            for flushed in effort.flushed:
                own = [
                    engine.step_seconds(batch, effort.tokens, flushed)
                    - kernels(decode(batch, PROMPT + effort.tokens // 2))
                    for batch in effort.batches
                ]
                hosts.append(HostCost(max(flushed, 1), *line_through(effort.batches, own)))
            cold = hosts[-1].step + hosts[-1].row
            extra = [
                engine.prompt_seconds(tokens, effort.samples, effort.flushed[-1])
                - kernels(prefill(tokens))
                - cold
                for tokens in PROMPTS
            ]
            request, token = line_through(PROMPTS, extra)
        finally:
            engine.close()
    return replace(measured, host=tuple(hosts), host_request=request, host_token=token)


def _write(folder: Path) -> int:
    """The network's folder, with the bundled model's text; returns the size of the vocabulary."""
    bundled = find_model("")
    vocab = int(json.loads((bundled / "config.json").read_text())["vocab_size"])
    (folder / "config.json").write_text(json.dumps({**NETWORK, "vocab_size": vocab}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, folder / name)
    return vocab


class _Engine:
    """An engine whose steps are timed one by one."""

    def __init__(
        self, folder: Path, vocab: int, machine: Machine, effort: Effort, limits: Limits
    ) -> None:
        longest, most = max(PROMPTS) + effort.tokens, max(effort.batches)
        engine = launch(
            EngineConfig(
                model=str(folder),
                load_format="random",
                dtype="bfloat16",
                device="cpu",
                threads=machine.threads,
                kernels="torch" if machine.kernels == "torch" else "native",
                max_model_len=longest,
                max_num_seqs=most,
                max_num_batched_tokens=max(PROMPTS),
                num_blocks=(most + 1) * (longest // 16 + 2),
            )
        )
        self._client, self._limits = engine.client, limits
        self._processor = OutputProcessor(engine.tokenizer)
        self._vocab, self._random, self._serial = vocab, random.Random(0), 0
        self.close = engine.client.close

    def step_seconds(self, batch: int, tokens: int, flushed: int) -> float:
        """A step with one token for each of `batch` sequences, so many bytes read before it."""
        for _ in range(batch):
            self._add(PROMPT, tokens)
        while True:  # until every prompt is through
            done = self._client.poll()
            self._processor.process(done)
            if len(done) == batch:
                break
        times = []
        for _ in range(tokens - batch // 16 - 3):
            times.append(self._timed_step(flushed))
        while self._client.has_requests:
            self._processor.process(self._client.poll())
        return undisturbed(times)

    def prompt_seconds(self, tokens: int, samples: int, flushed: int) -> float:
        """A request for one token, from its coming to its end."""
        times = []
        for _ in range(samples + 1):
            self._flush(flushed)
            started = time.perf_counter()
            self._add(tokens, 1)
            while self._client.has_requests:
                self._processor.process(self._client.poll())
            times.append(time.perf_counter() - started)
        return undisturbed(times[1:])

    def _timed_step(self, flushed: int) -> float:
        self._flush(flushed)
        started = time.perf_counter()
        self._processor.process(self._client.poll())
        return time.perf_counter() - started

    def _flush(self, num_bytes: int) -> None:
        if num_bytes:
            self._limits.read_rate(num_bytes)

    def _add(self, tokens: int, output: int) -> None:
        self._serial += 1
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        prompt = [self._random.randrange(self._vocab) for _ in range(tokens)]
        request = EngineRequest(f"calibrate-{self._serial}", prompt, params)
        self._processor.add(request, None, streaming=False)
        self._client.add(request)


def line_through(xs: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Least squares of a + b * x, neither below 0."""
    count, mean = len(xs), sum(xs) / len(xs)
    level = sum(seconds) / count
    spread = sum((x - mean) ** 2 for x in xs)
    steep = sum((x - mean) * (s - level) for x, s in zip(xs, seconds, strict=True))
    each = max(0.0, steep / spread) if spread else 0.0
    return max(0.0, level - each * mean), each
