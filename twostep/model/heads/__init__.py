"""Heads that draft what the served model will say next, from what it sees half-way or at its end.

    head.py      what a head computes: the contract
    source.py    where one comes from, and whether it is one of a model
    tap.py       what each step of the model leaves for it: states by slot, and its own keys and values
    eagle.py     EAGLE-3: a layer over three of the model's states (its weights and their training: twostep/model/eagle)
    mtp.py       multi-token prediction: a layer that comes with the model (DeepSeek-V3)
    medusa.py    Medusa: a small network for each of the next tokens, which see none of those before them

How they draft for an engine: twostep/model/runner/head_rounds.py (for many sequences at once, round after round), head_graphs.py (on a
GPU) and head_proposer.py.

What is where, of a sequence of tokens 5 7 2, whose next one, 9, has just been sampled:

    position               0      1      2      3      4
    token                  5      7      2      9
    state by slot          s0     s1     s2                     of the model, left by its steps
    the head's keys        5,s0   7,s0   2,s1   9,s2   8,h      the last two are written by rounds, and again by the step that comes next
                                                └▶ 8   └▶ 3     drafted

What a token is to a head is it and the state of the token before it (a first token has its own), so that all of a block is known when the
block's tokens are: its last layer is the head's, and blocks are shared, handed over and moved as ever.
"""
