"""`twostep lab eagle`: trains an EAGLE-3 head (twostep/model/eagle/) on a model's own answers.

1. answers.py     prompts are cut out of texts, and the model answers them
2. target.py      what the model sees half-way through each answer, and what it thinks comes next
3. training.py    the head learns to say the same, several steps ahead on its own outputs
4. acceptance.py  of answers held back: how many proposals are what the model said

folder.py keeps all of it where the head will be, so that it can be interrupted and continued.
"""
