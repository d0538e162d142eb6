"""Operations for CPUs, in C, where torch's own took longer; without a compiler, torch's.

`library.py` builds and loads the C files. `functions.py` calls the operations of `cpu.c` one by one, and has
them by torch for every other device, precision and shape, and the whole loss of a small head (`head.c`)
and what follows the gradients (`update.c`); `block.py` and `token.py` call whole transformer blocks
(`block.c`) and a whole generated token (`token.c`), which are made of them.
"""
