"""Model families: what a decoder is made of, and how its config.json and its checkpoint are read.

A family is a page: one file here and one line in registry.ARCHITECTURES and in checkpoint/architectures.py. What families share are parts:

    layers.py      how norms, attention and MLP stand around the residual        attention.py, mlp.py   what stands there
    modules.py     linear layers, norms, and the places that a checkpoint's tensors go to
    rope.py        rotary embeddings      config.py   a decoder's shape, windows      sharding.py   what each of several ranks holds
    fused.py       layers that a checkpoint has inside larger ones

The file has a Decoder: `architecture` (config.json's model_type), `supported` (its row of docs/models.md), the checkpoint's names,
`_layer`, which puts a layer together from parts, `_last_norm`, and `parse`, which takes the keys of config.json that it knows; whatever is
left over is refused. With an encoder (t5.py) it has a `forward` of its own, too. CONTRIBUTING.md adds one step by step. A line in
tests/models_forward/forward_helpers.py makes a small random model of it, whose logits must be transformers'.

A relative of Llama needs `parse` alone, or another part in its layer (qwen.py). What no device offers yet is a method of Ops
(kernels/ops.py): weights that stay in a checkpoint's format (LinearFormat) are another `prepare_linear`, which LinearLayer alone knows; an
MLP of another kind is an Mlp; attention of another kind has Attention's methods, and its KV is a KvShape.
"""
