"""The chat template of a NeMo 1 model that was tuned on conversations, in the words of ``apply_chat_template``.

Source: NeMo 1.23 to 2.2, ``gpt_sft_chat_dataset.py``, ``text_generation_server.py`` and
``megatron_gpt_finetuning_config.yaml``: with ``data.chat`` a conversation is a system turn, which is always there, and
the turns of ``User`` and ``Assistant``; what stands between is ``data.chat_prompt_tokens``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from handover.errors import CheckpointError
from models.checks import shown

_TOKENS = ("system_turn_start", "turn_start", "end_of_name", "end_of_turn")
_TEMPLATE = (
    "{%% if messages and messages[0]['role'] == 'system' %%}"
    "{%% set system, turns = messages[0]['content'], messages[1:] %%}"
    "{%% else %%}{%% set system, turns = '', messages %%}{%% endif %%}"
    "{{ %(system_turn_start)s + 'System' + %(end_of_name)s + system + %(end_of_turn)s }}"
    "{%% for turn in turns %%}"
    "{{ %(turn_start)s + (turn['role'] | capitalize) + %(end_of_name)s + turn['content'] + %(end_of_turn)s }}"
    "{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ %(turn_start)s + 'Assistant' + %(end_of_name)s }}{%% endif %%}"
)


def chat_template(config: Mapping[str, Any]) -> str:
    """Write the template; empty: the model was not tuned on conversations, or does not say how they are written.

    Raises:
        CheckpointError: a token is missing or no text.
    """
    data = config.get("data")
    tokens = data.get("chat_prompt_tokens") if isinstance(data, Mapping) and data.get("chat") else None
    if not isinstance(tokens, Mapping):
        return ""
    for name in _TOKENS:
        if not isinstance(tokens.get(name), str):
            raise CheckpointError(
                f"model_config.yaml: data.chat_prompt_tokens.{name} is {shown(tokens.get(name))}, not a text",
                "set data.chat: false to convert the model without a chat template",
            )
    return _TEMPLATE % {name: json.dumps(tokens[name]) for name in _TOKENS}
