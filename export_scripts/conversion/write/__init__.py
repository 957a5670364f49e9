"""Files in the making: shards and safetensors, by several processes, such that a killed conversion continues."""
