"""How the values of a tensor are read, wherever they lie.

A tensor of a source is an array that is described and not read yet. Its kind decides how ``mapped.Reader`` reads it:

| kind of array | made by | used where | what is read |
|---|---|---|---|
| range of a file | ``mapped.map_record`` | its bytes lie together: torch, safetensors, npz, shards | runs of bytes |
| array of pieces | ``array_of_pieces`` | they lie in many places: chunks of distributed files | a box of each |
| low-rank sum | ``low_rank.LowRankSum`` | a LoRA is merged into a matrix | its base; the product is added |
| scaled numbers | ``scaled.Scaled`` | FP8 and MXFP4 of Hugging Face | bytes and scales; they are multiplied |
| array in memory | numpy | a reader has computed it | nothing |

A conversion asks for boxes of a target (``conversion.write.shards.blocks``), or for runs of bytes where they stay as
they are (``conversion.write.copied_bytes``). ``checkpoints.tensor_values`` reads a small tensor whole, or compares two.
"""
