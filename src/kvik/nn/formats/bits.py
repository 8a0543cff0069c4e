"""Packs codes of a few bits into bytes and words, in the orders of the engine and of public
checkpoints.

`q` is [outputs, inputs] uint8 everywhere. A word is an int32, filled from its low bits. Unless a
function says otherwise, zero points [outputs, groups] are packed like weights, with groups in place
of inputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

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


def pack_gptq(q: Tensor, bits: int) -> Tensor:
    """Pack GPTQ's `qweight`: the codes of an output are one stream of bits along its inputs.

    With 3 bits, 32 inputs fill three words, and a code may span two.

    Returns:
        [inputs * bits / 32, outputs] int32.

    Raises:
        ValueError: the codes of an output do not fill whole words.
    """
    return _stream(q, bits).t().contiguous()


def unpack_gptq(words: Tensor, bits: int) -> Tensor:
    """[words, outputs] -> [outputs, words * 32 / bits]."""
    return _unstream(words.t(), bits)


def pack_gptq_zeros(zeros: Tensor, bits: int) -> Tensor:
    """Pack GPTQ's `qzeros`: a stream along the outputs, [groups, outputs * bits / 32] int32.

    This is the format "gptq_v2"; the older "gptq" needs `subtract_one` as well.

    Raises:
        ValueError: the codes of a group do not fill whole words.
    """
    return _stream(zeros.t(), bits)


def unpack_gptq_zeros(words: Tensor, bits: int) -> Tensor:
    """[groups, words] -> [outputs, groups]."""
    return _unstream(words, bits).t().contiguous()


def subtract_one(words: Tensor, bits: int) -> Tensor:
    """Subtract 1 from each packed zero point, as the format "gptq" stores them.

    Where a zero point is 0, GPTQModel borrows from the next code of the word (but not with 3 bits)
    and reverses that when it reads. AutoGPTQ never has a zero point of 0.
    """
    return _shifted(words, bits, -1)


def add_one(words: Tensor, bits: int) -> Tensor:
    """Undo `subtract_one`."""
    return _shifted(words, bits, 1)


def _shifted(words: Tensor, bits: int, by: int) -> Tensor:
    if WORD % bits:
        return _stream((_unstream(words, bits) + by).bitwise_and_(2**bits - 1), bits)
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
    return _stream(mixed.flatten(1), AWQ_BITS)


def unpack_awq(words: Tensor) -> Tensor:
    """[inputs, words] -> [outputs, inputs]."""
    mixed = _unstream(words, AWQ_BITS).view(*words.shape, len(AWQ_ORDER))
    place = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    return mixed[:, :, place].flatten(1).t().contiguous()


def pack_compressed(q: Tensor, bits: int) -> Tensor:
    """Pack compressed-tensors' `weight_packed` ("pack-quantized"), as its version 0.20 writes it:
    the codes of an output are one stream of bits, and the last word is padded with zeros.

    The format is specified in signed values but stores them as unsigned codes, so symmetric weights
    need no shift.

    Returns:
        [outputs, ceil(inputs * bits / 32)] int32.
    """
    padded = torch.nn.functional.pad(q, (0, -q.shape[1] % WORD))
    return _stream(padded, bits)[:, : compressed_words(q.shape[1], bits)].contiguous()


def compressed_words(codes: int, bits: int) -> int:
    """Return the number of words that a row of codes takes."""
    return -(-codes * bits // WORD)


def unpack_compressed(words: Tensor, bits: int, inputs: int) -> Tensor:
    """[outputs, words] -> [outputs, inputs]."""
    padded = torch.nn.functional.pad(words, (0, -words.shape[1] % bits))
    return _unstream(padded, bits)[:, :inputs].contiguous()


def pack_compressed_zeros(zeros: Tensor, bits: int) -> Tensor:
    """Pack compressed-tensors' `weight_zero_point` along the outputs: [words, groups] int32."""
    return pack_compressed(zeros.t(), bits).t().contiguous()


def unpack_compressed_zeros(words: Tensor, bits: int, outputs: int) -> Tensor:
    """[words, groups] -> [outputs, groups]."""
    return unpack_compressed(words.t(), bits, outputs).t().contiguous()


def _stream(codes: Tensor, bits: int) -> Tensor:
    """[rows, codes] -> [rows, codes * bits / 32] int32, code after code without gaps.

    The layout repeats after the fewest codes that fill whole words.
    """
    rows, count = codes.shape
    if count * bits % WORD:
        raise ValueError(f"{count} codes of {bits} bits do not fill words of {WORD} bits")
    period = WORD // math.gcd(WORD, bits)
    cycles = codes.reshape(rows, -1, period).to(torch.int32)
    words = torch.zeros(
        rows, cycles.shape[1], period * bits // WORD, dtype=torch.int32, device=codes.device
    )
    for i in range(period):
        word, shift = divmod(i * bits, WORD)
        words[:, :, word] |= cycles[:, :, i] << shift
        if shift + bits > WORD:
            words[:, :, word + 1] |= cycles[:, :, i] >> WORD - shift
    return words.flatten(1)


def _unstream(words: Tensor, bits: int) -> Tensor:
    """[rows, words] -> [rows, words * 32 / bits] uint8."""
    period = WORD // math.gcd(WORD, bits)
    cycles = words.reshape(len(words), -1, period * bits // WORD)
    codes = torch.empty(len(words), cycles.shape[1], period, dtype=torch.uint8, device=words.device)
    for i in range(period):
        word, shift = divmod(i * bits, WORD)
        low = min(bits, WORD - shift)  # bits of the code in its first word
        code = (cycles[:, :, word] >> shift) & 2**low - 1
        if low < bits:
            code |= (cycles[:, :, word + 1] & 2 ** (bits - low) - 1) << low
        codes[:, :, i] = code
    return codes.flatten(1)
