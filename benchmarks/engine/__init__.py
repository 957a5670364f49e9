"""The engine in process, on a CPU or a GPU: generation, conversations, long prompts, grammars, pages."""
