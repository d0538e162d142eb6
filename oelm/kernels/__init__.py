"""Operations for CPUs, in C, where torch's own took twice as long; without a compiler, torch's.

`library.py` builds and loads `cpu.c`; `functions.py` calls it, and has the same operations by torch for
every other device, precision and shape.
"""
