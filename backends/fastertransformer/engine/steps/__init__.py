"""The steps that the scheduler asks of the network, warmed up and captured as CUDA graphs on a GPU."""
