"""What the documentation names is there: links, commands, examples, the walk to a replay."""

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BatchFeature,
    Qwen2VLImageProcessorPil,
    Qwen3VLForConditionalGeneration,
)

from vitgraph.bench.dummy_model import write_model
from vitgraph.graphs import CompilationConfig, EncoderCudaGraphManager
from vitgraph.graphs.cli.main import _parser

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "bench/README.md",
    "graphs/README.md",
    "graphs/vllm_plugin/README.md",
    "graphs/sglang_plugin/README.md",
)
TEXT = {page: (ROOT / page).read_text() for page in PAGES}
SOURCES = {
    "bench": "".join(map(Path.read_text, (ROOT / "bench").glob("*.py"))),
    "tests": "".join(map(Path.read_text, (ROOT / "tests").glob("*.py"))),
}


def commands() -> Iterator[tuple[str, str]]:
    """(page, command) of every line of an indented block and every piece of code in a line."""
    starts = r"(?:vitgraph(?! serves)|make|python|pytest|torchrun) [^`\n]*"
    for page, text in TEXT.items():
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for command in re.findall(rf"^    ({starts})", text, flags=re.MULTILINE):
            yield page, re.sub(r"\s+#.*", "", command)
        for command in re.findall(rf"`({starts})`", text):
            yield page, command


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings of plain words."""
    headings = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
    return {heading.lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page) -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT[page])
    assert links
    for link in links:
        if not link.startswith("https://"):
            file, _, heading = link.partition("#")
            found = (ROOT / page).parent / file
            assert found.exists(), link
            assert not heading or heading in anchors(found.read_text()), link


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_commands_exist(page, command) -> None:
    words = shlex.split(command.replace("[", "").replace("]", "").replace("\\", ""))
    options = {word for word in words[1:] if word.startswith("--")}
    if words[0] == "make":
        targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
        return
    if words[0] == "vitgraph":
        complete = {"bench": ["encoder"]} if len(words) == 2 else {}
        metavars = {"...": "1", "JSON": "{}", "N": "1"}
        words = [metavars.get(word, word) for word in words[1:]]
        _parser().parse_args(words + complete.get(words[0], []))
        return
    if "-m" in words:
        module = words[words.index("-m") + 1]
        if module == "pytest":
            words = ["pytest", *words[words.index("-m") + 2 :]]
        else:
            assert importlib.util.find_spec(module) is not None
    for word in words[1:]:
        if "/" in word and not word.startswith("-"):
            assert (ROOT / word.split("::")[0]).exists(), word
    folder = "tests" if "tests/" in command else "bench"
    known = set(re.findall(r'"(--[a-z-]+)"', SOURCES[folder])) | {"--nproc-per-node", "--help"}
    assert options <= known


def test_environment_variables_exist() -> None:
    named = set(re.findall(r"VITGRAPH_\w+", "".join(TEXT.values())))
    packages = [file for folder in ("kernels", "graphs") for file in (ROOT / folder).rglob("*.py")]
    assert named and named <= set(
        re.findall(r"VITGRAPH_\w+", "".join(map(Path.read_text, packages)))
    )


def blocks(page: str) -> list[str]:
    """The Python examples of a page, for a CPU and a local model."""
    return re.findall(r"```python\n(.*?)```", TEXT[page], flags=re.DOTALL)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny Qwen3-VL with random weights."""
    folder = write_model(tmp_path_factory.mktemp("model"), "tiny")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    Qwen3VLForConditionalGeneration(config).float().save_pretrained(folder)
    return folder


@pytest.fixture
def run(checkpoint):
    """Runs an example in a namespace, here and in little."""

    def run(code: str, namespace: dict) -> None:
        here = {
            "Qwen/Qwen3-VL-8B-Instruct": str(checkpoint),
            "photo.jpg": str(ROOT / "graphs/cli/photos/cat.jpg"),
            '"cuda"': '"cpu"',
            "torch.bfloat16": "torch.float32",
        }
        for there, instead in here.items():
            code = code.replace(there, instead)
        exec(compile(code, "example", "exec"), namespace)

    return run


def test_examples_of_pytorch(run, tmp_path, capsys) -> None:
    """The README's, then those of graphs/README.md in the same namespace."""
    names: dict = {}
    run(blocks("README.md")[0], names)
    config, rows = names["encoder"].config, names["rows"]
    assert rows.dtype == torch.float32 and rows.shape[1] == config.output_width
    # bytes, eagerly, against floats through the manager
    graphed = torch.cat([names["merged"], *names["deepstack"]], dim=1)
    assert len(names["deepstack"]) == len(config.deepstack_visual_indexes)
    torch.testing.assert_close(rows, graphed, atol=1e-3, rtol=1e-3)

    fp8, hook, parallel, files, _ = blocks("graphs/README.md")
    run(fp8, quantised := {})
    assert len(quantised["encoder"].fp8_blocks) == config.depth - 3
    run(hook, names)
    assert re.fullmatch(r"\d+ tokens, budget \d+: \d+\.\d+ s\n", capsys.readouterr().out)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        run(parallel, names)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(names["per_item"][0], rows, atol=1e-3, rtol=1e-3)
    run(files, names)
    ours = torch.cat([names["merged"], *names["deepstack"]], dim=1)
    assert names["media"].grid == tuple(names["batch"]["image_grid_thw"][0].tolist())
    torch.testing.assert_close(ours, rows, atol=1e-2, rtol=1e-2)  # resized by torch, not Pillow


def test_example_of_ray(run, tmp_path, monkeypatch) -> None:
    """With a Ray that only calls what it is given; tests/test_ray_data.py has the real one."""
    read: list[dict] = []
    made: dict = {}

    def map_batches(actor, *, fn_constructor_kwargs, **options) -> SimpleNamespace:
        batch = {"path": np.array([row["path"] for row in read])}
        made.update(actor(**fn_constructor_kwargs)(batch), **options)
        return SimpleNamespace(write_parquet=lambda path: made.update(path=path))

    data = SimpleNamespace(
        from_items=lambda rows: read.extend(rows) or SimpleNamespace(map_batches=map_batches)
    )
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(data=data))
    monkeypatch.chdir(tmp_path)
    Path("list.txt").write_text(f"{ROOT / 'graphs/cli/photos/cat.jpg'}\n")
    run(blocks("graphs/README.md")[4], {})
    assert made["num_gpus"] == 1 and made["error"].tolist() == [""]
    assert len(made["embeddings"][0]) == made["grid"][0].prod() // 4


class Processor:
    """AutoProcessor without torchvision: the same chat template, tokenizer and image processor."""

    def __init__(self, folder: str) -> None:
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    from_pretrained = classmethod(lambda cls, folder: cls(folder))

    def apply_chat_template(self, chat, *, add_generation_prompt, tokenize, **form) -> BatchFeature:
        assert add_generation_prompt and tokenize and form.pop("return_dict")
        image, text = chat[0]["content"]
        batch = self.images([image["path"]], **form)
        tokens = int(batch["image_grid_thw"].prod()) // 4
        prompt = f"<|vision_start|>{'<|image_pad|>' * tokens}<|vision_end|>{text['text']}"
        ids = self.tokenizer(prompt, **form)["input_ids"]
        pad = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        return BatchFeature({**batch, "input_ids": ids, "mm_token_type_ids": (ids == pad).int()})

    def batch_decode(self, *args, **kwargs) -> list[str]:
        return self.tokenizer.batch_decode(*args, **kwargs)


def test_example_of_transformers(run, monkeypatch, capsys) -> None:
    import transformers

    monkeypatch.setattr(transformers, "AutoProcessor", Processor)
    names: dict = {}
    run(blocks("README.md")[1], names)
    manager = names["model"].model.visual.vitgraph.manager
    assert manager.get_cumulative_stats()["graph_hits"] == 1
    assert names["answer"].shape[1] > names["prompt"]["input_ids"].shape[1]
    assert capsys.readouterr().out.startswith("[")


def test_walk_to_the_replay(encoder, batch) -> None:
    """ARCHITECTURE.md's list: the calls of manager.py into other files until the replay."""
    config = CompilationConfig(True, encoder_cudagraph_token_budgets=(64,))
    manager = EncoderCudaGraphManager(encoder, config)
    manager.capture()
    manager._graphs.on_gpu = True  # for the order of calls
    manager_file = ROOT / "graphs" / "manager.py"
    calls: list[str] = []

    def record(frame: FrameType, event: str, _: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or caller is None or Path(caller.f_code.co_filename) != manager_file:
            return
        file = Path(code.co_filename)
        if file != manager_file and ROOT in file.parents and ".venv" not in file.parts:
            name = re.sub(r"\.__\w+__$", "", code.co_qualname)
            calls.append(f"{file.stem}.{name}")

    sys.setprofile(record)
    try:
        manager.execute(batch([(1, 4, 4), (1, 4, 8)]))
    finally:
        sys.setprofile(None)
    walk = list(dict.fromkeys(calls))
    replay = walk.index("capture.BudgetGraphs.replay")
    assert "capture.BudgetGraphs.check_module" in walk[replay:]
    walk = walk[: replay + 1]
    section = TEXT["ARCHITECTURE.md"].split("## From `manager.execute`")[1].split("\n## ")[0]
    assert re.findall(r"^\d+\. `([\w.]+)`", section, flags=re.MULTILINE) == walk
    assert len(walk) <= 8


def test_folders_of_the_tree() -> None:
    folders = re.findall(r"^    (\w+)/ ", TEXT["ARCHITECTURE.md"], flags=re.MULTILINE)
    assert set(folders) == {"kernels", "encoder", "graphs", "bench", "tests", "top"}
    assert all((ROOT / folder).is_dir() for folder in folders)


def test_files_in_the_table_of_questions() -> None:
    table = TEXT["ARCHITECTURE.md"].split("## Where to look")[1]
    files = re.findall(r"[\w/]+/[\w]+\.py", table)
    assert len(files) > 6
    assert all((ROOT / file).exists() for file in files)
