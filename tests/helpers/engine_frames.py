"""Handmade answers of /v1/engine."""

from __future__ import annotations

from typing import Any


def live_request(number: int, **fields: Any) -> dict[str, Any]:
    """Return a decoding request that arrived at 90, was scheduled at 92 and had a token at 95."""
    request = {
        "number": number,
        "phase": "decode",
        "arrival": 90.0,
        "first_scheduled": 92.0,
        "first_token": 95.0,
        "finished": None,
        "prompt_tokens": 17,
        "output_tokens": 5,
        "cached_tokens": 0,
        "computed": 21,
        "blocks": 2,
        "preemptions": 0,
        "finish_reason": None,
    }
    return request | fields


def engine_frame(**live: Any) -> dict[str, Any]:
    """Return a frame; `live` changes parts of its view of the engine."""
    view = {
        "now": 100.0,
        "stats": {
            "num_running": 1,
            "num_waiting": 0,
            "kv_usage": 0.5,
            "steps": 1234,
            "preemptions": 3,
            "prefix_queries": 200,
            "prefix_hits": 50,
            "time": {"executor": 50.0, "host": 8.0, "idle": 6.0},
        },
        "rates": {"steps": 40.0, "prefill_tokens": 2048.0, "decode_tokens": 321.0},
        "blocks": {
            "num_blocks": 512,
            "blocks_per_cell": 1,
            "num_free": 256,
            "num_cached": 99,
            "cells": "",
        },
        "steps": {"first": 0, "prefill_tokens": [0, 8, 16], "decode_tokens": [1, 2, 4]},
        "running": [live_request(7)],
        "waiting": [],
        "finished": [],
    }
    return {"model": "stories", "state": "ready", "reason": "", "live": view | live}
