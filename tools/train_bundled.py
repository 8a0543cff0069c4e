"""Make the bundled story models: prepare, tokenizer, target, draft, export, evaluate.

    python tools/train_bundled.py all --data DATA --work build/bundled
    python tools/train_bundled.py target --work build/bundled --resume

Every stage reads what the stages before it left in the work folder, so that one can be repeated
alone. Everything random comes from `--seed`; the learning rate, however, follows the clock (a
stage is given minutes, not steps, and always ends with the rate at zero), so the number of steps
depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from story_data import END, END_OF_TEXT, SPECIAL_TOKENS, Rows, Story, load_stories, train_tokenizer
from story_measures import accepted_share, held_out_loss, samples
from story_model import DRAFT, TARGET, Llama, ModelConfig
from tokenizers import Tokenizer
from torch import Tensor

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
LONG_SHARE = 0.2  # the last part of a stage, trained on rows as long as the context
SHORT_ROWS, SHORT_LENGTH = 16, 256
LONG_ROWS, LONG_LENGTH = 4, 1024


@dataclass
class Progress:
    """What a checkpoint remembers besides the weights."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0


# --- training --------------------------------------------------------------------------------


def rate(progress: float, warmup: float = 0.01, hold: float = 0.35) -> float:
    """Return the factor of the learning rate: it rises, is 1 until `hold`, then falls to zero."""
    return min(1.0, (progress + 1e-4) / warmup, max(0.0, (1.0 - progress) / (1.0 - hold)))


def make_optimizers(
    model: Llama, matrix_rate: float, other_rate: float, decay: float
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        inside = parameter.dim() == 2 and "embed_tokens" not in name
        (matrices if inside else others).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            matrices, lr=matrix_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def save_checkpoint(
    path: Path, model: Llama, optimizers: list[torch.optim.Optimizer], progress: Progress
) -> None:
    """Write a checkpoint through a temporary file, so that a kill never leaves half of one."""
    state = {
        "model": model.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
        "progress": asdict(progress),
    }
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def plain_loss(logits: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def train(
    model: Llama,
    rows: Rows,
    checkpoint: Path,
    options: argparse.Namespace,
    minutes: float,
    loss_of: Callable[[Tensor, Tensor, Tensor], Tensor],
    rates: tuple[float, float],
    on_pause: Callable[[Llama, Progress], None],
) -> None:
    """Train until `minutes` of training time are used up.

    Training time is the sum of the times between steps, with gaps of more than five seconds left
    out: a process that was stopped and continued, or wrote a checkpoint, did not train meanwhile.
    """
    optimizers = make_optimizers(model, *rates, decay=options.decay)
    progress = Progress()
    if options.resume and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        progress = Progress(**state["progress"])
    compiled = torch.compile(model, dynamic=False) if options.compile else model
    total, last = minutes * 60, time.monotonic()
    next_log, next_pause = progress.step, progress.seconds + 60 * options.pause_minutes
    average = math.nan
    while progress.seconds < total:
        done = progress.seconds / total
        long = done >= 1 - LONG_SHARE
        shape = (LONG_ROWS, LONG_LENGTH) if long else (SHORT_ROWS, SHORT_LENGTH)
        batch = torch.from_numpy(rows.batch(progress.tokens, *shape, done))
        inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        factor = rate(done)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
        with torch.autocast("cpu", torch.bfloat16):
            logits = compiled(inputs)
        loss = loss_of(logits, inputs, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        average = value if math.isnan(average) else 0.98 * average + 0.02 * value
        now = time.monotonic()
        gap, last = now - last, now
        if gap < 5.0:
            progress.seconds += gap
        progress.step += 1
        progress.tokens += inputs.numel()
        if progress.step >= next_log:
            next_log = progress.step + 50
            speed = progress.tokens / max(progress.seconds, 1.0)
            print(
                f"step {progress.step} seconds {progress.seconds:.0f}/{total:.0f} "
                f"tokens {progress.tokens} lr x{factor:.3f} loss {average:.4f} {speed:.0f} tok/s",
                flush=True,
            )
        if progress.seconds >= next_pause or progress.seconds >= total:
            next_pause = progress.seconds + 60 * options.pause_minutes
            save_checkpoint(checkpoint, model, optimizers, progress)
            on_pause(model, progress)
            last = time.monotonic()


# --- stages ----------------------------------------------------------------------------------


def prepare(options: argparse.Namespace) -> None:
    """Clean the texts and mark the held-out split."""
    stories = load_stories(options.data)
    options.work.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(story)) for story in stories]
    (options.work / "stories.jsonl").write_text("\n".join(lines) + "\n")
    for group in dict.fromkeys(s.group for s in stories):
        members = [s for s in stories if s.group == group]
        characters, held = sum(len(s.text) for s in members), sum(s.held_out for s in members)
        print(f"{group}: {len(members)} documents, {characters} characters, {held} held out")


def read_stories(options: argparse.Namespace) -> list[Story]:
    """Return the documents that `prepare` wrote."""
    lines = (options.work / "stories.jsonl").read_text().splitlines()
    return [Story(**json.loads(line)) for line in lines]


def tokenizer_stage(options: argparse.Namespace) -> None:
    """Train the tokenizer that both models share."""
    tokenizer = train_tokenizer(read_stories(options), TARGET.vocab_size)
    tokenizer.save(str(options.work / "tokenizer.json"))
    print(f"tokenizer: {tokenizer.get_vocab_size()} entries")


def read_tokenizer(options: argparse.Namespace) -> Tokenizer:
    """Return the tokenizer of the work folder."""
    return Tokenizer.from_file(str(options.work / "tokenizer.json"))


def reporter(
    options: argparse.Namespace, name: str, stories: list[Story], tokenizer: Tokenizer
) -> Callable[[Llama, Progress], None]:
    """Return a function for each pause: it prints held-out figures and a sample, and exports."""

    def report(model: Llama, progress: Progress) -> None:
        scores = held_out_loss(model, tokenizer, stories, limit=400)
        figures = " ".join(f"{g} {s['loss']:.4f}" for g, s in scores.items())
        print(f"held-out {name} step {progress.step}: {figures}", flush=True)
        for label, text in samples(model, tokenizer, 60, seed=options.seed):
            print(f"  [{label}] {text!r}", flush=True)
        write_folder(options, name, model, tokenizer)
        (options.work / f"{name}.progress.json").write_text(json.dumps(asdict(progress)) + "\n")

    return report


def target_stage(options: argparse.Namespace) -> None:
    """Train the target on the next token."""
    torch.manual_seed(options.seed)
    stories, tokenizer = read_stories(options), read_tokenizer(options)
    rows = Rows(stories, tokenizer, options.seed)
    print(f"training tokens: {rows.tokens}", flush=True)
    train(
        Llama(TARGET),
        rows,
        options.work / "target.pt",
        options,
        options.target_minutes,
        plain_loss,
        (options.matrix_rate, options.other_rate),
        reporter(options, "target", stories, tokenizer),
    )


def draft_stage(options: argparse.Namespace) -> None:
    """Train the draft on the target's distribution, which decides how many drafts are accepted."""
    torch.manual_seed(options.seed + 1)
    stories, tokenizer = read_stories(options), read_tokenizer(options)
    target = Llama.load(folders(options)["target"])

    def distil(logits: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            wanted = target(inputs)
        wanted = F.log_softmax(wanted.float().flatten(0, 1), dim=-1)
        given = F.log_softmax(logits.float().flatten(0, 1), dim=-1)
        return F.kl_div(given, wanted, reduction="batchmean", log_target=True)

    train(
        Llama(DRAFT),
        Rows(stories, tokenizer, options.seed + 1),
        options.work / "draft.pt",
        options,
        options.draft_minutes,
        distil,
        (1.5 * options.matrix_rate, 1.5 * options.other_rate),
        reporter(options, "draft", stories, tokenizer),
    )


def folders(options: argparse.Namespace) -> dict[str, Path]:
    """Return the folder of each model."""
    return {"target": options.out / "stories", "draft": options.out / "stories-draft"}


def write_folder(
    options: argparse.Namespace, name: str, model: Llama, tokenizer: Tokenizer
) -> None:
    """Write one model folder: weights, configs and tokenizer (the cards are written by hand)."""
    folder = folders(options)[name]
    bos, end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END)
    model.save(folder, bos, bos)
    tokenizer.save(str(folder / "tokenizer.json"))
    generation = {
        "bos_token_id": bos,
        "do_sample": True,
        "eos_token_id": [bos, end],
        "pad_token_id": bos,
        # chosen with choose_sampling.py
        "temperature": 0.7,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }
    special = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    tokens = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": special,
        "bos_token": END_OF_TEXT,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "model_max_length": model.config.max_positions,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for file, content in {"generation_config": generation, "tokenizer_config": tokens}.items():
        (folder / f"{file}.json").write_text(json.dumps(content, indent=2) + "\n")


def attribution(stories: list[Story]) -> str:
    """Return the authors of the CC BY stories, one line a story, and the public-domain books."""
    lines = [
        "# Attribution",
        "",
        "The models in this folder and its sibling were trained on the texts below. Spelling and",
        "spacing were tidied and markup removed; no text is reproduced here.",
        "",
        "## African Storybook (www.africanstorybook.org), CC BY",
        "",
        "Source: https://github.com/global-asp/asp-source, commit 99e022369a98, folder `en`.",
        "Title - text - licence (file):",
        "",
    ]
    for story in stories:
        if story.group == "stories":
            lines.append(f"- {story.title} - {story.author} - CC BY ({story.source})")
    lines += [
        "",
        "## Books in the public domain in the United States",
        "",
        "Sources: https://github.com/mlschmitt/classic-books-markdown, commit 944882722e9a, and,",
        "for Andrew Lang's fairy books, Project Gutenberg's texts at https://github.com/GITenberg.",
        "",
    ]
    books = dict.fromkeys(s.source for s in stories if s.group != "stories")
    lines += [f"- {Path(book).stem.replace('_', ' ')}" for book in sorted(books)]
    return "\n".join(lines) + "\n"


def load_checkpoint(options: argparse.Namespace, name: str, config: ModelConfig) -> Llama:
    """Return the weights of the last checkpoint of a stage."""
    model = Llama(config)
    state = torch.load(options.work / f"{name}.pt", weights_only=True)
    model.load_state_dict(state["model"])
    return model


def export(options: argparse.Namespace) -> None:
    """Write both model folders from the checkpoints, and the attribution of the stories."""
    tokenizer = read_tokenizer(options)
    for folder in folders(options).values():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ATTRIBUTION.md").write_text(attribution(read_stories(options)))
    for name, config in {"target": TARGET, "draft": DRAFT}.items():
        if (options.work / f"{name}.pt").exists():
            write_folder(options, name, load_checkpoint(options, name, config), tokenizer)


def evaluate(options: argparse.Namespace) -> None:
    """Write and print held-out figures and samples of the exported (bfloat16) weights, as JSON."""
    stories, tokenizer = read_stories(options), read_tokenizer(options)
    target, draft = (Llama.load(folders(options)[n]) for n in ("target", "draft"))
    report = {
        "parameters": {"target": target.parameter_count(), "draft": draft.parameter_count()},
        "target": held_out_loss(target, tokenizer, stories),
        "draft": held_out_loss(draft, tokenizer, stories),
        "accepted_share": accepted_share(target, draft, tokenizer, stories),
        "samples": samples(target, tokenizer, 220, options.seed),
    }
    text = json.dumps(report, indent=2)
    (options.work / "evaluation.json").write_text(text + "\n")
    print(text)


STAGES: dict[str, Callable[[argparse.Namespace], None]] = {
    "prepare": prepare,
    "tokenizer": tokenizer_stage,
    "target": target_stage,
    "draft": draft_stage,
    "export": export,
    "evaluate": evaluate,
}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--data", type=Path, help="folder with the two .tar.xz files of text")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    bundled = Path(__file__).resolve().parent.parent / "src" / "kvik" / "bundled"
    parser.add_argument("--out", type=Path, default=bundled, help="folder for the two models")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument("--target-minutes", type=float, default=65)
    parser.add_argument("--draft-minutes", type=float, default=9)
    parser.add_argument("--pause-minutes", type=float, default=5, help="time between checkpoints")
    parser.add_argument("--matrix-rate", type=float, default=4e-3, help="peak rate of Muon")
    parser.add_argument("--other-rate", type=float, default=2e-3, help="peak rate of AdamW")
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay of the matrices")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    options = parser.parse_args()
    if options.stage in ("prepare", "all") and options.data is None:
        parser.error("--data is needed to prepare the texts")
    return options


def main() -> None:
    """Run one stage, or all of them in order."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    (options.work / "pid").write_text(f"{os.getpid()}\n")
    for name, stage in STAGES.items():
        if options.stage in (name, "all"):
            print(f"== {name}", flush=True)
            stage(options)


if __name__ == "__main__":
    main()
