"""Stop strings in streamed text, matched across the borders of tokens and pushes.

An Aho-Corasick automaton (1975) over the stop strings: the depth of its state is the length of the
longest end of the text that may still become a stop string, which is just what is held back. The
cost per character does not depend on the text before it nor on the number of stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopTable:
    """The automaton. It does not change, so any number of outputs may share it."""

    def __init__(self, stop: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # trie of the stop strings, node 0 is the root
        self.depth = [0]  # characters from the root
        self.match = [""]  # the longest stop string that ends at this node
        for text in stop:
            self._add(text)
        self._fail = self._link()  # the longest proper end of a node that is a node too
        self.starts = frozenset(self._next[0])  # characters that a stop string begins with

    def step(self, node: int, char: str) -> int:
        """The node after one more character."""
        while node and char not in self._next[node]:
            node = self._fail[node]
        return self._next[node].get(char, 0)

    def _add(self, text: str) -> None:
        node = 0
        for char in text:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[node] + 1)
                self.match.append("")
            node = self._next[node][char]
        self.match[node] = text

    def _link(self) -> list[int]:
        """Failure links in order of depth, handing down the matches they lead to."""
        self._fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                self._fail[child] = self.step(self._fail[node], char)
                self.match[child] = self.match[child] or self.match[self._fail[child]]
                queue.append(child)
        return self._fail


class StopStrings:
    """Watches one output for its stop strings.

    The match that ends first wins; of those that end together, the longest. With `include` the
    released text ends with the match, otherwise just before it.
    """

    def __init__(self, table: StopTable, include: bool) -> None:
        self._table = table
        self._include = include
        self._node = 0
        self._held = ""
        self._found: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string if one was found.

        Whatever is pushed after a match is dropped.

        Args:
            may_end: a stop string that ends in this text is a match. One that only begins in it may
                be one later in any case.
        """
        if self._found is not None:
            return "", self._found
        table = self._table
        if self._node == 0 and table.starts.isdisjoint(text):
            return text, None
        seen = len(self._held)
        known = self._held + text
        for end, char in enumerate(text, start=seen + 1):
            node = table.step(self._node, char)
            self._node = node
            if may_end and table.match[node]:
                self._found = table.match[node]
                self._held = ""
                cut = end if self._include else end - len(self._found)
                return known[:cut], self._found
        free = len(known) - table.depth[self._node]
        self._held = known[free:]
        return known[:free], None

    def flush(self) -> str:
        """The held text, when the output ends without a match."""
        text, self._held = self._held, ""
        self._node = 0
        return text
