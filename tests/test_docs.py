"""Every Python block of README and docs runs, block after block in one namespace for each page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
@pytest.mark.filterwarnings("ignore:overrides. 'embedding' matches no layer")
def test_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": f"docs_{page.stem.replace('-', '_')}"}
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)):
        exec(compile(block, f"{page.name}, block {number + 1}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_readme_shows_the_real_report():
    """The lines of the printed report in README are those of the demo today."""
    import inro_fx
    from inro_fx.demo import load_digits_model
    model, images, _ = load_digits_model()
    real = str(inro_fx.report(inro_fx.quantize_graph(model, images[:64]))).splitlines()
    shown = re.search(r"^```\n(layer .*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)[1].splitlines()
    numbers = re.compile(r"[\d.,]+%?|-{2,}|/(c|torch)$")     # a machine without a compiler has no linear/c: the last column
    blank = {re.sub(r"\s+", " ", numbers.sub("#", line)).strip() for line in real}
    for line in shown:
        assert line == "..." or re.sub(r"\s+", " ", numbers.sub("#", line)).strip() in blank, line
        assert not line.startswith("captured") or line in real, line        # counts, the same on every machine
