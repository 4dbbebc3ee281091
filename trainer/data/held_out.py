"""Splits documents into those to train on and those held out, by their content.

Which side a conversation is on depends on its tokens and the seed alone: adding or reordering records moves no other,
and records that are equal stay together.
"""

from __future__ import annotations

import hashlib

import numpy as np

from trainer.data.documents import DataError, Documents

_WORDS = 2**64


def split(documents: Documents, share: float, seed: int) -> tuple[Documents, Documents]:
    """The documents to train on and those held out, about `share` of all.

    Raises:
        DataError: one of the two would be empty.
    """
    chosen = np.fromiter(
        (_draw(documents, number, seed) < share for number in range(len(documents))), np.bool_, len(documents)
    )
    if len(documents) and chosen.all() == chosen.any():
        side = "all" if chosen.all() else "none"
        raise DataError(
            f"data.held_out {share:g} holds out {side} of {len(documents)} documents: take another share, or name a "
            "file of conversations to measure on"
        )
    key = f"{documents.content_hash} {share!r} {seed}"
    names = [hashlib.sha256(f"{key} {side}".encode()).hexdigest()[:32] for side in ("trained", "held out")]
    return documents.part(np.flatnonzero(~chosen), names[0]), documents.part(np.flatnonzero(chosen), names[1])


def _draw(documents: Documents, number: int, seed: int) -> float:
    """A number in [0, 1) that the document's tokens and the seed decide."""
    tokens, _ = documents.document(number)
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest) / _WORDS
