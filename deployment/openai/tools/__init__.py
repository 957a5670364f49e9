"""Tools and reasoning: what a client declares, how a family of models writes calls and thoughts, and how they are read.

A dialect is one record. What must follow it is a grammar, so that every call that is complete names a declared tool
and has arguments that match its schema; what comes back is read by the same record.
"""
