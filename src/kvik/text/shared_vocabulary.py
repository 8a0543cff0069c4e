"""Which tokens two tokenizers have in common, so that one model may draft for another."""

from __future__ import annotations

from kvik.config.errors import ConfigError
from kvik.text.tokenizer import Tokenizer

LEAST_SHARED = 0.9  # of the target's tokens: below that it is another vocabulary


def shared_vocabulary(target: Tokenizer, draft: Tokenizer) -> tuple[int, ...] | None:
    """The target's id of each of the draft model's tokens, -1 where it has none; None: the ids are
    the same.

    Tokens are the same if they are spelt the same in both vocabularies.

    Raises:
        ConfigError: too few are.
    """
    ours, theirs = target.library.get_vocab(True), draft.library.get_vocab(True)
    if ours == theirs:
        return None
    found = [-1] * draft.vocab_size
    for token, draft_id in theirs.items():
        found[draft_id] = ours.get(token, -1)
    shared = len(ours.keys() & theirs.keys()) / len(ours)
    if shared < LEAST_SHARED:
        raise ConfigError(
            "spec_model",
            f"knows {shared:.0%} of the model's tokens; at least {LEAST_SHARED:.0%} must be spelt "
            "the same",
        )
    return tuple(found)
