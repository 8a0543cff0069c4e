"""Packs codes of a few bits into bytes and words, in the orders of the engine and of public
checkpoints.

`q` is [outputs, inputs] uint8 everywhere. A word is an int32, filled from its low bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

WORD = 32
# AutoAWQ: index, among eight neighbouring outputs, of the i-th four bits of a word.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ_BITS = 4


def pack_nibbles(q: Tensor) -> Tensor:
    """Pack in the engine's order: [outputs, inputs] -> [outputs, inputs / 2] uint8, the even input
    in the low bits.

    Raises:
        ValueError: the number of inputs is odd.
    """
    if q.shape[1] % 2:
        raise ValueError(f"{q.shape[1]} inputs do not fill bytes of two codes")
    return q[:, ::2] | q[:, 1::2] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[outputs, bytes] -> [outputs, 2 * bytes]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def words_of(codes: int, bits: int) -> int:
    """Return the number of words that a stream of codes takes."""
    return -(-codes * bits // WORD)


def pack_stream(codes: Tensor, bits: int) -> Tensor:
    """Pack each row as one stream of bits, in which a code may span two words; the last word is
    padded with zeros.

    GPTQ and compressed-tensors ("pack-quantized", as its version 0.20 writes it) store weights as
    streams along the inputs, and zero points as streams along the outputs; GPTQ's are transposed.
    compressed-tensors specifies signed values but stores them as unsigned codes, so symmetric
    weights need no shift.

    Args:
        codes: [rows, codes] uint8.

    Returns:
        [rows, words] int32.
    """
    period, length = _cycle(bits)
    rows, count = codes.shape
    cycles = _filled(codes, period).reshape(rows, -1, period).to(torch.int32)
    words = torch.zeros(rows, cycles.shape[1], length, dtype=torch.int32, device=codes.device)
    for i in range(period):
        word, shift = divmod(i * bits, WORD)
        words[:, :, word] |= cycles[:, :, i] << shift
        if shift + bits > WORD:
            words[:, :, word + 1] |= cycles[:, :, i] >> WORD - shift
    return words.flatten(1)[:, : words_of(count, bits)].contiguous()


def unpack_stream(words: Tensor, bits: int, count: int) -> Tensor:
    """[rows, words] -> [rows, count] uint8."""
    period, length = _cycle(bits)
    cycles = _filled(words, length).reshape(len(words), -1, length)
    codes = torch.empty(len(words), cycles.shape[1], period, dtype=torch.uint8, device=words.device)
    for i in range(period):
        word, shift = divmod(i * bits, WORD)
        low = min(bits, WORD - shift)  # bits of the code in its first word
        code = (cycles[:, :, word] >> shift) & 2**low - 1
        if low < bits:
            code |= (cycles[:, :, word + 1] & 2 ** (bits - low) - 1) << low
        codes[:, :, i] = code
    return codes.flatten(1)[:, :count].contiguous()


def _cycle(bits: int) -> tuple[int, int]:
    """Return the fewest codes that fill whole words, and the words: the layout repeats there."""
    shared = math.gcd(WORD, bits)
    return WORD // shared, bits // shared


def _filled(rows: Tensor, cycle: int) -> Tensor:
    """Pad rows with zeros to whole cycles."""
    missing = -rows.shape[1] % cycle
    return pad(rows, (0, missing)) if missing else rows


def subtract_one(words: Tensor, bits: int) -> Tensor:
    """Subtract 1 from each packed zero point, as the format "gptq" stores them ("gptq_v2" does
    not).

    Where a zero point is 0, GPTQModel borrows from the next code of the word (but not with 3 bits)
    and reverses that when it reads. AutoGPTQ never has a zero point of 0.
    """
    return _shifted(words, bits, -1)


def add_one(words: Tensor, bits: int) -> Tensor:
    """Undo `subtract_one`."""
    return _shifted(words, bits, 1)


def _shifted(words: Tensor, bits: int, by: int) -> Tensor:
    if WORD % bits:
        codes = unpack_stream(words, bits, words.shape[1] * WORD // bits) + by
        return pack_stream(codes.bitwise_and_(2**bits - 1), bits)
    return words + by * sum(1 << shift for shift in range(0, WORD, bits))


def pack_awq(q: Tensor) -> Tensor:
    """Pack AutoAWQ's `qweight` or `qzeros` (GEMM): eight outputs in a word, interleaved.

    Returns:
        [inputs, outputs / 8] int32.

    Raises:
        ValueError: the number of outputs is not a multiple of eight.
    """
    outputs, inputs = q.shape
    if outputs % len(AWQ_ORDER):
        raise ValueError(f"{outputs} outputs do not fill words of {len(AWQ_ORDER)}")
    order = torch.tensor(AWQ_ORDER, device=q.device)
    mixed = q.t().reshape(inputs, -1, len(AWQ_ORDER))[:, :, order]
    return pack_stream(mixed.flatten(1), AWQ_BITS)


def unpack_awq(words: Tensor) -> Tensor:
    """[inputs, words] -> [outputs, inputs]."""
    inputs, count = words.shape
    mixed = unpack_stream(words, AWQ_BITS, count * len(AWQ_ORDER)).view(inputs, count, -1)
    place = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    return mixed[:, :, place].flatten(1).t().contiguous()
