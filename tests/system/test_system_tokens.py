"""Right tokens: router → prefill → Ray → decode gives what the single-process engine gives, token for token, in float32, with a real
model's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from loads import answered
from oracle import Oracle
from quantized_tensors import KINDS, quantize_directory
from running import running
from t5_models import save_t5
from tiny_models import IM_END, save_tiny_model, save_tokenizer
from transformers import PreTrainedTokenizerFast

from twostep import InvalidRequest, SamplingOptions

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.mark.usefixtures("alone")
def test_equals_the_oracle(smollm2_dir: Path, tmp_path: Path) -> None:
    """In many chunks, on two decode workers that have measured themselves, in blocks of another size than the oracle's."""
    extra = ("--dtype", "float32", "--block-size", "32", "--max-num-batched-tokens", "48")
    with running(smollm2_dir, tmp_path, decode=2, extra=extra) as system:
        # Every demonstration of it shows this.
        with system.client() as client:
            answer = client.chat([{"role": "user", "content": "What is the capital of France?"}], max_tokens=8, temperature=0.0).result()
        assert "Paris" in answer.text
        assert set(answered(system, Oracle(smollm2_dir), seed=48, count=6, longest=200)) == {"ray"}
        system.check_empty()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", [pytest.param("packed asymmetric", marks=pytest.mark.exhaustive), "fp8 rows"])
def test_quantized_checkpoints_equal_the_oracle(kind: str, tiny_llama_dir: Path, tmp_path: Path) -> None:
    """In chunks, and with inputs rounded in each of them alone."""
    model = tmp_path / "quantized"
    quantize_directory(tiny_llama_dir, model, KINDS[kind])
    extra = ("--dtype", "float32", "--block-size", "32", "--max-num-batched-tokens", "48")
    with running(model, tmp_path, extra=extra) as system:
        assert set(answered(system, Oracle(model), seed=48, count=8, longest=200)) == {"ray"}
        system.check_empty()


@pytest.mark.usefixtures("alone")
def test_latent_attention_and_weights_quantized_at_the_load_equal_the_oracle(tmp_path: Path) -> None:
    """What a token keeps, one vector, handed over in blocks of another size, on two decode workers."""
    model = save_tiny_model(tmp_path / "model", "deepseek_v2")
    extra = ("--dtype", "float32", "--quantization", "int8", "--block-size", "32", "--max-num-batched-tokens", "48")
    with running(model, tmp_path, decode=2, extra=extra) as system:
        assert set(answered(system, Oracle(model, quantization="int8"), seed=48, count=8, longest=200)) == {"ray"}
        system.check_empty()


@pytest.mark.usefixtures("alone")
def test_an_encoder_equals_the_oracle(tmp_path: Path) -> None:
    """What decoders attend to, handed over in blocks of another size, on two decode workers; and text, which is transformers'."""
    model = tmp_path / "model"
    model.mkdir()
    vocab_size = save_tokenizer(model)
    save_t5("t5-v1.1", model, vocab_size=vocab_size, eos_token_id=IM_END)
    oracle = Oracle(model)
    extra = ("--dtype", "float32", "--block-size", "32", "--max-num-batched-tokens", "340", "--max-num-seqs", "16")
    with running(model, tmp_path, decode=2, extra=extra) as system:
        assert set(answered(system, oracle, seed=48, count=8, longest=200)) == {"ray"}
        options = SamplingOptions(max_tokens=200, temperature=0.0, top_p=1.0, ignore_eos=True)
        prompt = list(range(3, 200))
        with system.client() as client:
            long = client.generate(token_ids=prompt, **options).result()
            said = client.chat([{"role": "user", "content": "What is the capital of France?"}], **options).result()
            with pytest.raises(InvalidRequest, match="--max-num-batched-tokens"):
                client.generate(token_ids=[5] * 325, max_tokens=1).result()
        oracle.compare(prompt, options, long.token_ids)
        assert len(long.token_ids) == 200
        assert said.text == PreTrainedTokenizerFast.from_pretrained(model).decode(said.token_ids, skip_special_tokens=True)
        system.check_empty()
