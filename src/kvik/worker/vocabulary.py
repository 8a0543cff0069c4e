"""Tokens of a draft model in the vocabulary of its target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Vocabulary:
    """What a draft model's tokens are in the target's vocabulary."""

    def __init__(
        self,
        target_size: int,
        draft_size: int,
        meanings: Sequence[int] | None,
        device: torch.device,
    ) -> None:
        """
        Args:
            target_size, draft_size: logits of the two models, which may be more than there are
                tokens.
            meanings: the target's id of each of the draft model's tokens, -1 where it has none;
                None: the same ids.
        """
        self._target_size = target_size
        self._draft_ids: Tensor | None = None
        self._target_ids: Tensor | None = None
        self._as_draft: Tensor | None = None
        if meanings is None and target_size == draft_size:
            return
        meant = torch.tensor(range(draft_size) if meanings is None else meanings[:draft_size])
        known = ((meant >= 0) & (meant < target_size)).nonzero()[:, 0]
        self._draft_ids, self._target_ids = known.to(device), meant[known].to(device)
        as_draft = torch.zeros(target_size, dtype=torch.int64)  # what it does not know is token 0
        as_draft[meant[known]] = known
        self._as_draft = as_draft.to(device)

    @property
    def same(self) -> bool:
        """Both models have the same tokens."""
        return self._as_draft is None

    def widened(self, logits: Tensor) -> Tensor:
        """Logits for the target's tokens; what the draft model does not know it never drafts.

        Args:
            logits: [rows, draft vocab].

        Returns:
            [rows, target vocab].
        """
        if self._draft_ids is None or self._target_ids is None:
            return logits
        wide = logits.new_full((len(logits), self._target_size), -torch.inf)
        wide[:, self._target_ids] = logits[:, self._draft_ids]
        return wide

    def narrow_(self, token_ids: Tensor) -> None:
        """The target's tokens as the draft model's, in place.

        Args:
            token_ids: [tokens] int64.
        """
        if self._as_draft is not None:
            token_ids.copy_(self._as_draft[token_ids])
