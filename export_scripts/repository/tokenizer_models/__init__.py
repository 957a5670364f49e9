"""What runs inside Triton's Python stubs, before and after the engine.

Export copies these files into the model repository, side by side with the tokenizer's files. They
import the standard library, numpy, and tokenizers or sentencepiece; nothing of this project.
"""
