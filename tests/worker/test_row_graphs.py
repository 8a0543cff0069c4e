"""Draft heads as replayed graphs, padded with unused rows."""

from __future__ import annotations

import torch
from helpers.captured import Again
from torch import Tensor

from kvik.worker.captures import MIN_MISSES, GraphMemory
from kvik.worker.graphs import CapturedRows, RowGraph

calls: list[int] = []


def scaled(hidden: Tensor, by: Tensor) -> Tensor:
    calls.append(len(hidden))
    return hidden * by[:, None]


def rows(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3), torch.arange(count)


def test_rows_are_padded_with_the_same_results() -> None:
    again = Again()
    graph = CapturedRows(scaled, rows(1), (2, 4), again, lambda: 0.0, GraphMemory(9, 0))
    for count in [3] * MIN_MISSES + [3, 2, 4, 1, 5]:
        inputs = rows(count)
        torch.testing.assert_close(graph.run(*inputs), inputs[0] * inputs[1][:, None])
    assert again.replayed == 4  # the last run of 3 rows, and later ones that need little padding
    assert graph.idle_step() is False and len(again.captured) == 2
    calls.clear()
    for count in (1, 2, 3, 4, 5):
        inputs = rows(count)
        torch.testing.assert_close(graph.run(*inputs), inputs[0] * inputs[1][:, None])
    assert calls == [2, 2, 4, 4, 5] and not graph.idle_step()


def test_an_idle_engine_captures_the_largest_size_first() -> None:
    """The others fit in its memory."""
    again = Again()
    graph = CapturedRows(scaled, rows(1), (1, 2, 4), again, lambda: 0.0, GraphMemory(9, 0))
    calls.clear()
    assert (
        graph.idle_step() and graph.idle_step() and not graph.idle_step() and not graph.idle_step()
    )
    assert calls == [4, 1, 2]


def test_rows_are_not_padded_to_far_more() -> None:
    """If no other size can be captured for lack of memory."""
    again = Again()
    graph = CapturedRows(scaled, rows(1), (1, 2, 4, 8), again, lambda: 0.0, GraphMemory(1, 0))
    assert graph.idle_step() and not graph.idle_step() and len(again.captured) == 1
    for count, replayed in ((5, 1), (4, 2), (3, 3), (2, 3), (1, 3)):
        inputs = rows(count)
        torch.testing.assert_close(graph.run(*inputs), inputs[0] * inputs[1][:, None])
        assert again.replayed == replayed


def test_an_eager_graph_has_nothing_to_do_while_idle() -> None:
    graph = RowGraph(scaled)
    assert graph.run(*rows(3)).shape == (3, 3) and not graph.idle_step()
