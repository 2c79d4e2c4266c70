"""Which parameter goes to Muon and which to AdamW.

Muon orthogonalises a matrix that maps hidden features to hidden features. Embeddings and output heads are matrices by
shape only (their rows are independent vectors), so the rule needs names besides shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_ADAMW_NAMES = (
    r"embed|(^|[._])emb([._]|$)"  # embedding, tok_embeddings, pos_emb
    r"|(^|\.)(wte|wpe|lm_head|head|unembed|classifier)(\.|$)|(^|\.)output(\.weight)?$"
    # of transformers: heads of classifiers and of BERT, the embedding of T5 and BART, T5's biases of distances
    r"|(^|\.)(score|decoder|shared)\.weight$|relative_attention_bias"
    r"|bias(es)?$|norm[^.]*(\.[^.]*)?$"  # stacked biases and norm scales of experts and heads are matrices by shape
)
"""Searched in the dotted parameter name; a match sends the parameter to AdamW."""


def is_matrix(shape: Sequence[int]) -> bool:
    """Tell whether ``shape`` is a matrix (rows, columns) or a stack of matrices (experts, rows, columns)."""
    return len(shape) in (2, 3) and min(shape[-2:]) > 1
