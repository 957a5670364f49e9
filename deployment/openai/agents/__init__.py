"""APIs for agents beside chat completions: OpenAI's Responses and Anthropic's Messages.

A request of either is written as one of chat completions and read, planned and generated as that is; its answer is a
list of blocks (thoughts, text, calls), which each API writes in its own form, whole or as events.
"""
