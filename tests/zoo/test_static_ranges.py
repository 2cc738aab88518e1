"""Integer activations on real models: static ranges by observer, beside dynamic ones."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import folder
from test_minilm import batches, own_module, vectors
from test_small_models import Speaker, clips, digits_probe, equal_error_rate
from test_smollm2 import language_model, perplexity  # noqa: F401 - a fixture

import inro_fx

pytestmark = pytest.mark.zoo
OBSERVERS = ("minmax", "histogram", "percentile")


def worst(small):
    return "; ".join(f"{r.layer} {r.isolated:.1%}" for r in inro_fx.report(small).worst(3))


def test_sentence_vectors(show):
    model, data = own_module(), list(batches())
    want, found = vectors(model), {}
    for observer in OBSERVERS:
        small = inro_fx.quantize_graph(model, data[0], inro_fx.static(observer), calibration=data[:2])
        found[observer] = F.cosine_similarity(want, vectors(small)).mean().item()
    show(**found, worst=worst(small))
    assert found["histogram"] >= 0.985


def test_speaker_verification(show):
    model = Speaker().eval()
    model.load_state_dict(torch.load(folder("resemblyzer") / "pretrained.pt", map_location="cpu", weights_only=True)["model_state"], strict=False)
    mels, labels = clips()
    found = {"float": equal_error_rate(model(mels), labels)}
    for scheme in ("int8_dynamic", *map(inro_fx.static, OBSERVERS)):
        small = inro_fx.quantize_graph(model, mels[:4], scheme, calibration=list(mels[:64].split(16)))
        found[getattr(scheme, "observer", scheme)] = equal_error_rate(small(mels), labels)
    show(**found, schemes={r.op: r.scheme for r in inro_fx.report(small).rows})
    assert max(found["histogram"], found["int8_dynamic"]) <= 0.135


def test_efficientnet(show):
    model, images, probe = digits_probe()
    found = {"float": probe(model)}
    for scheme in ("int8_dynamic", inro_fx.static()):
        small = inro_fx.quantize_graph(model, images[:2], scheme, calibration=list(images[:40].split(20)))
        found[getattr(scheme, "observer", scheme)] = probe(small)
    show(**found)
    assert min(found.values()) >= 0.91


def test_perplexity(language_model, show):  # noqa: F811 - the fixture
    tokenizer, model = language_model
    text = (folder("gensim") / "test/test_data/lee_background.cor").read_text("latin1")
    ids = tokenizer(text[30_000:50_000], return_tensors="pt").input_ids[0]
    data = [ids[i * 256:(i + 1) * 256][None] for i in range(4)]
    found = {"float": perplexity(model, tokenizer)}
    for scheme in ("int8_dynamic", *map(inro_fx.static, OBSERVERS)):
        small = inro_fx.quantize_graph(model, {"input_ids": ids[None, :8]}, scheme, calibration=[{"input_ids": d} for d in data])
        found[getattr(scheme, "observer", scheme)] = perplexity(small, tokenizer)
    show(**found, worst=worst(small))
    assert found["int8_dynamic"] <= 45
    assert np.isfinite(list(found.values())).all()
