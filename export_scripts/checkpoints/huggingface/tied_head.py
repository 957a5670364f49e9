"""A head that the configuration calls the embedding's copy: it may go where it is one, and counts where it is not.

Rule: transformers 5, ``tie_weights`` of ``modeling_utils.py``: of two tensors that differ none is dropped. Version 4
ties whatever the configuration says.
"""

from __future__ import annotations

from collections.abc import Mapping

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.tensor_values import same_values
from export_scripts.weights.architecture import Architecture
from export_scripts.weights.schema import LazyTensor
from export_scripts.weights.settings import Settings

_TIE = "tie_word_embeddings"


def is_said_tied(settings: Settings, architecture: Architecture) -> bool:
    """Whether the configuration calls the output projection the embedding."""
    return bool(settings.get(_TIE, architecture.has_tied_head))


def untied_where_it_differs(
    settings: Settings, architecture: Architecture, tensors: Mapping[str, LazyTensor], archive: Archive
) -> tuple[Settings, tuple[str, ...]]:
    """Compare a tied head with the embedding where the files hold both; both are read unless they are one.

    Returns:
        The configuration, whose head is untied where it differs, and what is to be said of that.
    """
    embedding, head = tensors.get(architecture.embedding), tensors.get(architecture.head)
    if not is_said_tied(settings, architecture) or embedding is None or head is None:
        return settings, ()
    if same_values(head, embedding, archive):
        return settings, ()
    said = (
        f"{architecture.head} differs from {architecture.embedding}, although {_TIE} is true: it is taken for the head "
        f"that it is, as transformers 5 does; transformers 4 computes with the embedding"
    )
    return Settings({**settings, _TIE: False}), (said,)
