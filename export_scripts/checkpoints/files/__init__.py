"""Bytes of a checkpoint: archives, torch's and safetensors' files, distributed checkpoints, read in place."""
