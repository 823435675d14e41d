"""A shuffle that gives what `numpy.random.RandomState(seed).shuffle(list)` gives, without numpy.

verl picks the validation samples that it logs with `RandomState(42)`; who wants the same prompts needs the same
generator: MT19937 (Matsumoto and Nishimura 1998, init_genrand) and numpy's frozen legacy shuffle (Fisher-Yates from the
end, indices by masked rejection). Tested against numpy itself.
"""

from __future__ import annotations

from collections.abc import Iterator

SIZE, SHIFT = 624, 397
WORD = 0xFFFFFFFF


def shuffled(count: int, seed: int) -> list[int]:
    """The numbers 0 … count - 1 as numpy's legacy generator shuffles them. `seed`: 0 … 2**32 - 1."""
    order = list(range(count))
    words = _words(seed)
    for last in range(count - 1, 0, -1):
        mask = (1 << last.bit_length()) - 1
        while (other := next(words) & mask) > last:
            pass
        order[last], order[other] = order[other], order[last]
    return order


def _words(seed: int) -> Iterator[int]:
    """The 32-bit words of MT19937."""
    state = [seed & WORD]
    for index in range(1, SIZE):
        state.append((1812433253 * (state[-1] ^ (state[-1] >> 30)) + index) & WORD)
    while True:
        for index in range(SIZE):
            word = (state[index] & 0x80000000) | (state[(index + 1) % SIZE] & 0x7FFFFFFF)
            state[index] = state[(index + SHIFT) % SIZE] ^ (word >> 1) ^ (0x9908B0DF if word & 1 else 0)
        for word in state:
            yield _tempered(word)


def _tempered(word: int) -> int:
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    return word ^ (word >> 18)
