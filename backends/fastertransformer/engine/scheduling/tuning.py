"""The scheduler's numbers that were found by measuring: their unit, where each was found, and when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """What was tuned, by the module that reads it; a date is the day on which a value was set."""

    # arrivals.py: bursts of 256 requests from the OpenAI endpoint, H200, 2026-11-26.
    max_burst_gap_s: float = 0.0006  # between two requests of a burst; an endpoint's process takes 0.2 to 0.3 ms each
    max_burst_s: float = 0.008  # that a step waits for a burst: as long as a small pass
    max_burst_decoding_s: float = 0.002  # the same while rows decode
    max_parse_s: float = 0.008  # per source and step while the GPU is idle: 100 requests
    max_parse_all_s: float = 0.032  # of all sources together

    # chunks.py: long prompts beside 32 rows that decode, Llama 8B, H200, 2026-11-23.
    min_budgets_to_chunk: int = (
        2  # a shorter prompt is run at once: it delays other rows little; fewer passes are faster
    )
    short_prompt_budgets: int = 4  # up to this length, chunks may be two budgets where rows decode in the same pass
    max_budget_tokens: int = 2048  # when many prompts wait
    max_budget_tokens_cpu: int = 256  # the demonstration, 2 cores, 2026-11-26
    # Eight prompts of 8,000 tokens, DeepSeek V2 Lite, H200, 2026-11-28: 2.65 s so, 5.54 with one budget and 2,048.
    latent_budgets: int = 4  # that a chunk has
    max_latent_tokens: int = 4096  # when many prompts wait
    attention_cost: float = 3.25  # of an operation of a chunk's attention, in operations of a product
    spare_time: float = 1.3  # a budget of 256 leaves so much of the time of two steps without a chunk
    token_multiple: int = 32  # of a chunk: mixed steps are captured for such numbers

    # step_room.py: 256 clients, Llama 8B, H100, 2026-11-28.
    burst_tokens: int = 2560  # of all that waits; up to these, a step in which rows decode is a captured mixed one
    burst_passes: int = 2  # of a step, while more than these wait

    # launch_times.py: GPT-3 5B under Poisson arrivals, H200, 2026-11-24.
    rows_of_size: int = 16  # steps whose rows fall into the same block of these are of one size
    tokens_of_size: int = 64  # and whose tokens do
    slack_s: float = 0.0005  # a step may be shorter than the last one of its size by this
    slack_share: float = 0.1  # and by this part of it
    lead_decay: float = 0.98  # of the longest time to launch a step, with each further one

    # prefill_pass.py: bounds of a pass's memory and of how long it delays others; chosen, not measured, 2026-11-20.
    pass_tokens: int = 4096  # padding and rows that decode count; few more would take another tile of every product
    pass_tokens_cpu: int = 512  # larger passes run no faster: the demonstration, 2 cores, 2026-11-26
    scored_token_cost: int = 2  # on that CPU, in tokens: logits of every one make it 1.3 to 2 times as long
    held_tokens: int = 8 * 4096  # that the rows of one pass continue, padding included

    # speculation.py: drafts. Of a CPU: a step of 8 rows of a Llama of 160M takes 1.6 times as long as of one, 2 cores,
    # 2026-11-27. Of a GPU: reckoned, not measured.
    draft_row_cost_cpu: float = 0.09  # how much longer a step takes with a token more, in steps of a single row
    draft_row_cost: float = 0.012  # the keys and values of 2,000 tokens of a Llama 8B
    draft_step_cost: float = 0.1  # of a step with drafts: nothing is launched ahead of it
    acceptance_prior: float = 0.5
    acceptance_memory: float = 0.8
    acceptance_memory_all: float = 0.98  # of all rows' drafts together, which a new row begins with
    steps_between_tries: int = 32  # or more, so that what a draft model runs for a try takes no more than this part:
    tries_share: float = 0.01


TUNING = Tuning()
