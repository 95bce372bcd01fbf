"""Grammars that generated text must match: sources, artefacts, and processes that compile. Knows no request and no gRPC.

The tokenizer service compiles (``CompileGrammar``), workers mask with what comes out; a worker that gets a bare source compiles
it the same way, so the code is shared. Only ``compile`` and what runs in the compile process import llguidance.

Why llguidance compiles and is a worker's default (``--structured-output backend=xgrammar`` takes the other). Both were run on the
100 schemas of ``tests/fixtures/json_schemas`` with the 262 144 tokens of Gemma 3 (one thread of a shared x86 core, llguidance
1.9.1, xgrammar 0.2.8; random tokens through the mask; xgrammar with ``strict_mode=False``):

==============================  =============================  ====================================
measure                         llguidance                     xgrammar
==============================  =============================  ====================================
imports without torch           yes, no dependencies, 8 MB     no: torch, transformers, tvm-ffi
vocabulary index, once          0.9 s CPU                      0.5 s
compile, mean / p99 / max       1.7 / 2.9 / 5.5 ms             673 / 5 827 / 6 582 ms
artefact, mean / max            384 B / 1.2 kB                 6.6 MB / 32.7 MB
mask, batch 1: p50 / p99        51 us / 1.3 ms                 97 us / 4.5 ms
accept a token, mean            21 us                          38 us
completed outputs that fail     0 of 177                       11 of 178 (ignores maxLength next to
their schema                                                   pattern, allOf, undeclared required)
keyword it cannot enforce       an error that names it         mostly ignored, or a logged warning
bounds on work                  fuel for compiling, fuel and   none: 6.6 s for one schema
                                items for each mask
==============================  =============================  ====================================

At batch 64 llguidance fills all masks of a step in 64 times the single time over the number of cores (its executor runs
the rows in parallel without the interpreter's lock).

Its artefact is its own normal form of the grammar: text in Lark's syntax with JSON schemas inside, depending on nothing but
the source (special tokens are named, not numbered). The lexer's automaton is built lazily while masking, bounded by fuel.
"""
