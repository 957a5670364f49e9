"""The conversion itself, which knows no family.

``move`` says where values go, ``write`` makes files of them, and ``plan`` says before that what a checkpoint becomes.
``job`` is what every conversion does, whatever it writes.
"""
