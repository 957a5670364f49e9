"""Servers of other projects over a Hugging Face directory: started, proved, watched and stopped like tritonserver.

Standard library only, and so is all that is imported here: the deploy stage may run in an engine's own container.
"""
