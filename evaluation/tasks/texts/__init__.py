"""Translation and summarization: sources with references, the run that both share, and ROUGE."""
