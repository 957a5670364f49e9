"""How the engine is asked for an answer, and what it gives."""
