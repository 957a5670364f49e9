"""What a load asks: lengths, prompts, conversations and recorded traces."""
