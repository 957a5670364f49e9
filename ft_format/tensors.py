"""Every input and output of a served model, declared once.

The engine reads requests by this table, the exported config.pbtxt declares it, the OpenAI endpoint and the evaluation's
client fill its tensors, and docs/tensors.md shows it (``make golden``). Names, types and shapes are
those of FasterTransformer backend's GPT and T5 guides; ``presence_penalty`` and ``min_length``, which the guides leave
out, stand in the tables of ``ParallelGpt``'s and ``T5Decoding``'s inputs. What is ours is ignored by its backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from models.checks import Range

BOOL, FLOAT, HALF, INT, UINT, SEED, TEXT = "|b1", "<f4", "<f2", "<i4", "<u4", "<u8", "|O"
"""Types, by numpy's names."""
DECODERS = frozenset(("gpt", "gptj", "gptneox", "llama"))
T5, ENCODER = frozenset(("t5",)), frozenset(("t5-encoder",))
GENERATORS, ALL = DECODERS | T5, DECODERS | T5 | ENCODER

NO_TOKEN = 2**31 - 1
"""A token that no vocabulary has, such as the end_id of a row that only its length ends. It fits an int."""
ARGMAX_NUCLEUS = 1e-6
"""A runtime_top_p that the most probable of fewer than a million tokens alone fills: greedy decoding, with
``output_log_probs`` over the vocabulary. With top_k 1 FasterTransformer reports them among the top 1, where all are 0
(``topk_stage2_sampling``)."""
_BEAM_WIDTHS = Range(0, 64)  # FasterTransformer's kernels; see the engine's beam.py for those that its backend takes
_SMALLEST = 2.0**-126  # above 0, of fp32's normal numbers
_TOP = Range(0, 20)  # as in the OpenAI API
_DRAFTS = "tokens that are drafted for a step at most; 0: none, -1: as deployed"


@dataclass(frozen=True)
class Tensor:
    """One input or output of the served model.

    Attributes:
        name: as clients send or receive it.
        kind: its type, by numpy's name.
        meaning: in a line, with its source where that is not FasterTransformer's guide.
        shape: behind the batch axis; () is one value a row, [B, 1] from clients; -1 is any length.
        default: of every row where the input is left out; None: it is required, config.ini's, or nothing at all.
        legal: what its values may be.
        families: that know it.
        is_optional: whether a request may leave the input out.
        is_ours: FasterTransformer's backend ignores the input, or never returns the output.
        works_with_beams: else it is refused with a beam_width above 1 unless it has no effect.
        is_ragged: requests of different lengths may share a batch.
        older_kinds: types that the engine takes too: older stores and clients have them.
    """

    name: str
    kind: str
    meaning: str
    shape: tuple[int, ...] = ()
    default: float | None = None
    legal: Range = Range()
    families: frozenset[str] = GENERATORS
    is_optional: bool = True
    is_ours: bool = False
    works_with_beams: bool = True
    is_ragged: bool = False
    older_kinds: tuple[str, ...] = ()


_flag = partial(Tensor, kind=BOOL, default=False)
_required = partial(Tensor, kind=UINT, is_optional=False)
_beyond = partial(Tensor, is_ours=True, works_with_beams=False)

REQUIRED = (
    _required("input_ids", meaning="token ids, padded behind", shape=(-1,), families=ALL, is_ragged=True),
    _required("input_lengths", meaning="tokens of the row; 0: it starts from start_id", families=DECODERS),
    _required("request_output_len", meaning="the most tokens to generate; 0 is legal", families=DECODERS),
    _required("sequence_length", meaning="tokens of the row of the encoder's input", families=T5 | ENCODER),
    _required("max_output_len", meaning="the most tokens to generate", families=T5),
)
SAMPLING = (
    Tensor("runtime_top_k", UINT, "draw from that many most probable tokens; 0: runtime_top_p decides", default=0),
    Tensor("runtime_top_p", FLOAT, "draw from the nucleus of this probability; 0: off", default=0.0, legal=Range(0, 1)),
    Tensor("beam_search_diversity_rate", FLOAT, "lowers the later candidates of one beam", default=0.0),
    Tensor("temperature", FLOAT, "divides the logits", default=1.0, legal=Range(0)),
    Tensor("len_penalty", FLOAT, "weighs hypotheses by their length; decoders' have one length", default=0.0),
    Tensor("repetition_penalty", FLOAT, "of tokens that have occurred, a factor", default=1.0, legal=Range(_SMALLEST)),
    Tensor("presence_penalty", FLOAT, "of tokens of input and output, taken off after temperature", default=0.0),
    Tensor("min_length", INT, "tokens before end_id may come", default=0, legal=Range(0), older_kinds=(UINT,)),
    Tensor("random_seed", SEED, "of the row; noise depends on seed and step alone", default=0, older_kinds=(INT,)),
    _flag("is_return_log_probs", meaning="asks for cum_log_probs and output_log_probs; of a beam along its own path"),
    Tensor("beam_width", UINT, "beams, the same in all rows of a request", default=1, legal=_BEAM_WIDTHS),
    Tensor("start_id", UINT, "what an empty input, or a decoder, starts from; config.ini's by default"),
    Tensor("end_id", UINT, "ends the row; config.ini's by default"),
)
CONTEXT_SCORES = (
    _flag("is_return_context_cum_log_probs", meaning="cum_log_probs covers the input too; with is_return_log_probs"),
    _flag("is_return_context_log_probs", meaning="asks for context_log_probs and context_argmax_ids", is_ours=True),
)
CONTEXT_EMBEDDINGS = _flag("is_return_context_embeddings", meaning="asks for context_embeddings", families=DECODERS)
WORD_LISTS = (
    Tensor("stop_words_list", INT, "words that end the row: all tokens, then the words' ends, padded with -1", (2, -1)),
    Tensor("bad_words_list", INT, "words that never come, laid out alike", (2, -1)),
)
PROMPT_LEARNING = (
    Tensor("prompt_learning_task_name_ids", UINT, "task whose learnt prompt or prefix the checkpoint holds", default=0),
    Tensor("request_prompt_embedding", HALF, "a learnt prompt that the request brings", (-1, -1)),
    Tensor("request_prompt_lengths", UINT, "its vectors", default=0),
    Tensor("request_prompt_type", UINT, "1 soft, 3 p/prompt tuning; 2, a prefix, is refused", default=0),
)
IA3_TASKS = Tensor("ia3_tasks", INT, "IA3 adapter of the row", default=-1, families=T5 | ENCODER)
NUCLEUS = (
    Tensor("top_p_decay", FLOAT, "factor of runtime_top_p after each token; outside (0, 1]: 1", default=1.0),
    Tensor("top_p_min", FLOAT, "end of the decay; outside (0, 1]: 0.5", default=1e-6),
    Tensor("top_p_reset_ids", UINT, "token that sets runtime_top_p back", default=NO_TOKEN),
)
_started = partial(Tensor, kind=UINT, families=T5, is_ours=True)
DECODER_INPUTS = (
    _started("decoder_input_ids", meaning="what follows the decoder's start token", shape=(-1,), is_ragged=True),
    _started("decoder_input_lengths", meaning="its tokens", default=0),
)
BEYOND_INPUTS = (
    _beyond("frequency_penalty", FLOAT, "of generated tokens by their count, before temperature (OpenAI)", default=0.0),
    _beyond("output_presence_penalty", FLOAT, "of generated tokens, before temperature (OpenAI)", default=0.0),
    _beyond("min_p", FLOAT, "least share of the largest probability (vLLM)", default=0.0, legal=Range(0, 1)),
    _beyond("logit_bias_ids", INT, "tokens whose logits are biased before all but bad words (OpenAI)", shape=(-1,)),
    _beyond("logit_bias_values", FLOAT, "what is added to each", shape=(-1,)),
    _beyond("stop_token_ids", INT, "tokens that end the row as end_id does (vLLM)", shape=(-1,)),
    _beyond("ignore_eos", BOOL, "end_id does not end the row (vLLM)", default=False, works_with_beams=True),
    _beyond("is_return_raw_log_probs", BOOL, "asks for output_raw_log_probs", default=False),
    _beyond("num_top_log_probs", UINT, "K of output_top_log_probs", default=0, legal=_TOP),
    Tensor("num_context_top_log_probs", UINT, "K of context_top_log_probs", default=0, legal=_TOP, is_ours=True),
    _beyond("guided_decoding_guide_type", TEXT, "kind of the guide, empty for none (TensorRT-LLM)"),
    _beyond("guided_decoding_guide", TEXT, "what the output must follow (TensorRT-LLM)"),
    Tensor("max_speculative_tokens", INT, _DRAFTS, default=-1, legal=Range(-1, 64), is_ours=True),
    Tensor("lora_name", TEXT, "adapter of the row; empty: none (vLLM)", families=DECODERS, is_ours=True),
)
"""What the OpenAI API has beyond FasterTransformer."""
SESSION = (
    Tensor("session_len", UINT, "the most tokens of a conversation that begins", default=0, families=DECODERS),
    Tensor("memory_len", UINT, "latest tokens that it attends to", default=0, families=DECODERS),
)
CONTROLS = (
    Tensor("START", INT, "of a conversation; Triton's sequence batcher sends it", families=DECODERS),
    Tensor("END", INT, "of one", families=DECODERS),
)
IS_RETURN_ATTENTIONS = _flag("is_return_attentions", meaning="asks for output_attentions of all rows", families=ENCODER)

INPUTS = {
    tensor.name: tensor
    for tensor in (
        *(*REQUIRED, *SAMPLING, *CONTEXT_SCORES, CONTEXT_EMBEDDINGS, *WORD_LISTS, *PROMPT_LEARNING, IA3_TASKS),
        *(*NUCLEUS, *DECODER_INPUTS, *BEYOND_INPUTS, *SESSION, *CONTROLS, IS_RETURN_ATTENTIONS),
    )
}

TEXT_START = Tensor("text_start", INT, "tokens before those that the answer before did not have", (-1,), is_ours=True)
_BEAMS, _TOKENS, _TOPS = (-1,), (-1, -1), (-1, -1, -1)  # [beam], [beam, n], [beam, n, K]
_ours = partial(Tensor, is_ours=True)
OUTPUTS = (
    Tensor("output_ids", UINT, "input and output, padded with end_id", _TOKENS, families=DECODERS),
    Tensor("sequence_length", UINT, "tokens of each beam in output_ids", _BEAMS, families=DECODERS),
    Tensor("output_ids", INT, "output, padded with end_id", _TOKENS, families=T5),
    Tensor("sequence_length", INT, "tokens of each beam in output_ids", _BEAMS, families=T5),
    Tensor("response_input_lengths", INT, "tokens of the input in output_ids", _BEAMS, families=DECODERS),
    Tensor("cum_log_probs", FLOAT, "sum of output_log_probs", _BEAMS),
    Tensor("output_log_probs", FLOAT, "natural log probability of each generated token", _TOKENS),
    Tensor("context_embeddings", FLOAT, "sum of the last layer's states", (-1, -1), families=DECODERS),
    _ours("context_log_probs", FLOAT, "of each token of the input after those before it; 0 for the first", (-1,)),
    _ours("context_argmax_ids", UINT, "most probable token in its place", (-1,)),
    _ours("finish_reason", INT, "0 not finished, 1 end_id or a stop_token_id, 2 a stop word, 3 the length", _BEAMS),
    _ours("output_raw_log_probs", FLOAT, "log softmax of the model's own logits (vLLM)", _TOKENS),
    _ours("output_top_log_probs", FLOAT, "the K largest of these in each token's place", _TOPS),
    _ours("output_top_ids", UINT, "their tokens", _TOPS),
    _ours("context_top_log_probs", FLOAT, "the K largest in the place of each token of the input", (-1, -1)),
    _ours("context_top_ids", UINT, "their tokens", (-1, -1)),
    TEXT_START,
    Tensor("output_hidden_state", FLOAT, "the encoder's last states", (-1, -1), families=ENCODER),
    Tensor("output_attentions", FLOAT, "of each layer and head; 0 in padding", (-1, -1, -1, -1), families=ENCODER),
)


def names_of(family: str) -> frozenset[str]:
    """Return the names of the inputs that a family knows."""
    return frozenset(tensor.name for tensor in INPUTS.values() if family in tensor.families)
