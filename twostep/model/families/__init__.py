"""Model families: what a decoder is made of, and how its config.json and its checkpoint are read.

To add a family, write one file here and one line in registry.ARCHITECTURES. The file has

1. a DecoderLayer (decoder.py): its norms and linear layers from Maker, and `place`, which registers every weight under the
   checkpoint's name and says how ranks of a tensor-parallel model cut it (Cut, modules.py)
2. a Decoder: `architecture` (config.json's model_type), the checkpoint's names, `_layer`, `_last_norm`, and `parse`, which takes the
   keys of config.json that it knows; whatever is left over is refused
3. a few lines in tests/models_forward/forward_helpers.py: a small random model of it, whose logits must be transformers'

A relative of Llama needs `parse` alone, or a layer beside it (qwen.py). What no device offers yet is a method of Ops (kernels/ops.py):
weights that stay in a checkpoint's format (LinearFormat) are another `prepare_linear`, which LinearLayer alone knows; a mixture of experts
is an MLP of its own behind `mlp_in` and `mlp_out`; attention of another kind overrides `attend`, and its KV is a KvShape.
"""
