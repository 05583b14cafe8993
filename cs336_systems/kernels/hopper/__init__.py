"""The kernels that run on Hopper alone (sm_90), in Gluon: same algorithms, but each warpgroup has a task of its own.

Plain Triton decides by itself when data moves and who waits; a program's warps all do the same thing, and while they
take exponentials the tensor cores idle. Gluon leaves these decisions to the kernel. A picture of the forward pass, one
program:

    loader (one warpgroup)      Q_0 Q_1 Q_2   K V  K V  K V  …        global memory -> shared memory, by the copy engine
                                 |   |   |     |
    attender 0 (64 queries)     Q_0 --+- S = Q K^T, softmax, O += P V  -> O_0, L     tensor cores and registers
    attender 1 (64 queries)     Q_1 --+- the same keys, other queries  -> O_1, L
    attender 2 (64 queries)     Q_2 --+- …                             -> O_2, L

The loader never computes, the attenders never load. Between them lie rings of buffers in shared memory (`Ring`), and
each buffer has two barriers:

- `filled` completes a phase when the bytes that the copy engine was asked for have arrived. Readers wait for it.
- `free` completes a phase when every reader has arrived on it, which each does once its matrix products no longer read
  the buffer. The loader waits for it before the next copy into that buffer.

A buffer lives from the copy that fills it to the last reader's arrival; the ring's number of stages is how far the
loader may run ahead. Attenders take turns on the tensor cores (`primitives.wait_for_turn`): while one's products run,
another takes its exponentials.

The backward passes have pictures of their own in `backward_d64.py` (head dims to 64) and `backward_d128.py` (to 128).
What passes through shared memory there is in `backward_parts.py`: `KeyTiles`, which stay; `QueryRing`, whose stages
have a `filled` barrier alone, since each kernel learns in its own way when they are free; and `Handover`, by which
warpgroups give one another dS.

Names and line numbers are those of `kernels/forward.py` and `kernels/backward.py`, which remain the text to learn from,
the fallback, and what runs where gradients have to be bit-equal from run to run.
"""
