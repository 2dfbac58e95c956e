"""EAGLE-3 heads (Li, Wei, Zhang, Zhang: EAGLE-3: Scaling up inference acceleration of large language models via training-time test, 2025,
arXiv 2503.01840): one decoder layer that drafts what a model will say next, from what it sees half-way through that model.

    config.py     a head's shape, out of its config.json
    head.py       its weights and what it computes of a position
    files.py      its directory: read with checks, and written
    unrolled.py   what it proposes at all positions of a sequence at once: what training and its measure go through

How it drafts: twostep/model/heads.
"""
