"""What users put on the modules of a tower acts, or is refused by name (KNOWN_FAILURES 33 to 36).

The forward reads weights and runs no submodule, so whatever is on one would be left out silently.
"""

import copy
import importlib.util

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from vitgraph.encoder import Qwen3VLVisionEncoder, VisionConfig
from vitgraph.encoder.structure import Structure, why_not_plain
from vitgraph.graphs import (
    CompilationConfig,
    EncoderCudaGraphManager,
    replace_vision_tower,
    restore_vision_tower,
)

GRIDS = [(1, 4, 4)]
needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed"
)


class Holder(nn.Module):
    """The least that `replace_vision_tower` takes."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.visual = tower


@pytest.fixture
def tower(tools):
    return tools.make_reference()


@pytest.fixture
def pixels():
    return torch.randn(16, 1536, generator=torch.Generator().manual_seed(0))


def served(tower, graphs: bool):
    config = CompilationConfig(True, (64,), 4) if graphs else None
    return replace_vision_tower(Holder(tower), config)


class LoudLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def subclassed(tower) -> None:
    tower.blocks[1].mlp.linear_fc1.__class__ = LoudLinear


def parametrized(tower) -> None:
    nn.utils.parametrize.register_parametrization(
        tower.blocks[1].mlp.linear_fc1, "weight", nn.Softplus()
    )


def patched(tower) -> None:
    tower.blocks[1].mlp.linear_fc1.forward = lambda x: 1 / 0


def appended(tower) -> None:
    tower.blocks.append(copy.deepcopy(tower.blocks[0]))


def replaced(tower) -> None:
    tower.blocks[1].mlp.linear_fc1 = nn.Sequential(nn.Linear(144, 304))


CHANGES = {
    "forward_hook": (
        lambda tower: tower.blocks[1].mlp.linear_fc1.register_forward_hook(lambda *_: None),
        r"blocks\.1\.mlp\.linear_fc1 has 1 forward hook",
    ),
    "forward_pre_hook": (
        lambda tower: tower.blocks[1].register_forward_pre_hook(lambda *_: None),
        r"blocks\.1 has 1 forward hook",
    ),
    "forward": (patched, r"blocks\.1\.mlp\.linear_fc1 has a forward of its own"),
    "subclass": (subclassed, r"blocks\.1\.mlp\.linear_fc1 is a .*LoudLinear"),
    "parametrization": (parametrized, r"blocks\.1\.mlp\.linear_fc1 is parametrized"),
    "weight_norm": (
        lambda tower: nn.utils.weight_norm(tower.blocks[1].mlp.linear_fc1),
        r"blocks\.1\.mlp\.linear_fc1 has 1 forward hook",
    ),
    "appended": (appended, r"parameters differ in blocks\.4\."),
    "replaced": (replaced, r"parameters differ in blocks\.1\.mlp\.linear_fc1\.0"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_what_is_put_on_a_served_module_is_refused(change, message, graphs, tower, pixels) -> None:
    """KNOWN_FAILURES 33: at the next call, on transformers' tower, and on an encoder of ours."""
    manager = served(tower, graphs)
    tower(pixels, torch.tensor(GRIDS))
    change(tower)
    batch = {"pixel_values": pixels, "image_grid_thw": GRIDS}
    for call in (lambda: tower(pixels, torch.tensor(GRIDS)), lambda: manager.execute(batch)):
        with pytest.raises(ValueError, match=message):
            call()
    restore_vision_tower(tower)
    with pytest.raises(ValueError, match=message):
        replace_vision_tower(tower)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_what_is_put_on_an_encoder_is_refused(change, message, encoder, pixels) -> None:
    """KNOWN_FAILURES 33."""
    encoder = copy.deepcopy(encoder)
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64,), 4))
    manager.capture()
    batch = {"pixel_values": pixels, "image_grid_thw": GRIDS}
    manager.execute(batch)
    change(encoder)
    for call in (
        lambda: encoder(pixels, GRIDS),
        lambda: manager.execute(batch),
        lambda: EncoderCudaGraphManager(encoder),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_hooks_on_an_encoder_itself(encoder, pixels) -> None:
    """They run where it is called, and no graph runs them."""
    encoder, seen = copy.deepcopy(encoder), []
    manager = EncoderCudaGraphManager(encoder)
    encoder.register_forward_hook(lambda *_: seen.append(1))
    encoder(pixels, GRIDS)
    assert seen == [1]
    with pytest.raises(ValueError, match="the encoder has forward hooks"):
        manager.execute({"pixel_values": pixels, "image_grid_thw": GRIDS})


def test_a_patched_class_is_seen(tower, pixels, monkeypatch) -> None:
    """KNOWN_FAILURES 33: of all modules at once."""
    served(tower, False)
    monkeypatch.setattr(type(tower.blocks[0]), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ValueError, match=r"blocks\.0 has a forward of its own"):
        tower(pixels, torch.tensor(GRIDS))


def test_a_subclass_with_a_forward_is_refused(tower) -> None:
    """KNOWN_FAILURES 33: it would be left out; a subclass without one is served."""
    tower.__class__ = type("Mine", (type(tower),), {})
    served(tower, False)
    restore_vision_tower(tower)
    tower.__class__ = type("Doubled", (type(tower),), {"forward": lambda self, x, grid_thw: 2 * x})
    with pytest.raises(ValueError, match="a forward of its own, which would be left out"):
        served(tower, False)


def test_a_hook_in_the_place_of_another_is_seen(tower, pixels) -> None:
    """KNOWN_FAILURES 33: transformers' own, which records hidden states, is none of ours."""
    served(tower, False)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="output_hidden_states"):
            tower(pixels, torch.tensor(GRIDS), output_hidden_states=True)
        tower(pixels, torch.tensor(GRIDS))
    hooks = tower.blocks[0]._forward_hooks
    assert len(hooks) == 1
    hooks.clear()
    tower.blocks[0].register_forward_hook(lambda module, inputs, output: 0 * output)
    with pytest.raises(ValueError, match=r"blocks\.0 has 1 forward hook"):
        tower(pixels, torch.tensor(GRIDS))


def test_what_was_removed_again_hinders_nobody(tower, pixels) -> None:
    served(tower, True)
    expected = tower(pixels, torch.tensor(GRIDS)).pooler_output
    hook = tower.blocks[0].register_forward_hook(lambda *_: None)
    hook.remove()
    tower.blocks[0].note = "an attribute that no result depends on"
    assert torch.equal(tower(pixels, torch.tensor(GRIDS)).pooler_output, expected)


def test_eps_is_followed(tower, pixels) -> None:
    """KNOWN_FAILURES 33: read at each eager forward; graphs hold it and ask to be captured."""
    grids = torch.tensor(GRIDS)
    tower.blocks[0].norm1.eps = 0.5
    expected = tower(pixels, grids).pooler_output
    tower.blocks[0].norm1.eps = 1e-6
    served(tower, False)
    assert not torch.allclose(tower(pixels, grids).pooler_output, expected, atol=1e-4)
    tower.blocks[0].norm1.eps = 0.5
    torch.testing.assert_close(tower(pixels, grids).pooler_output, expected)
    restore_vision_tower(tower)
    manager = served(tower, True)
    tower.blocks[0].norm1.eps = 0.25
    with pytest.raises(RuntimeError, match=r"blocks\.0\.norm1\.eps was changed since capture"):
        tower(pixels, grids)
    manager.capture()
    after = tower(pixels, grids).pooler_output
    restore_vision_tower(tower)
    torch.testing.assert_close(after, tower(pixels, grids).pooler_output)


def each_block(change):
    return lambda tower: [change(block) for block in tower.blocks]


ATTRIBUTES = {
    "interpolation_mode": lambda tower: setattr(tower, "interpolation_mode", "bicubic"),
    "interpolation_align_corners": lambda t: setattr(t, "interpolation_align_corners", False),
    "deepstack_visual_indexes": lambda tower: setattr(tower, "deepstack_visual_indexes", [1, 2, 3]),
    "scaling": each_block(lambda block: setattr(block.attn, "scaling", block.attn.scaling / 2)),
    "act_fn": each_block(lambda block: setattr(block.mlp, "act_fn", nn.ReLU())),
    "inv_freq": lambda tower: tower.rotary_pos_emb.inv_freq.mul_(0.5),
    "inv_freq is missing": lambda tower: delattr(tower.rotary_pos_emb, "inv_freq"),
    "inv_freq None": lambda tower: setattr(tower.rotary_pos_emb, "inv_freq", None),
    "inv_freq on meta": lambda tower: tower.rotary_pos_emb.to("meta"),
}


def test_frequencies_that_were_replaced_twice_are_seen(tower) -> None:
    """KNOWN_FAILURES 34: the second would get the id of the first, once that is gone."""
    rotary = tower.rotary_pos_emb
    rotary.inv_freq = rotary.inv_freq.clone()
    structure, first = Structure(tower), id(rotary.inv_freq)
    half = rotary.inv_freq / 2
    for _ in range(100):
        rotary.inv_freq = half.clone()
        if id(rotary.inv_freq) == first:
            break
    assert not structure.unchanged()
    assert structure.changed(tower) == ["rotary_pos_emb.inv_freq"]


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_that_change_results_are_refused(name, tower, pixels) -> None:
    """KNOWN_FAILURES 34: before the replacement, and after it."""
    other = copy.deepcopy(tower)
    ATTRIBUTES[name](tower)
    for take in (served, lambda tower, _: Qwen3VLVisionEncoder.from_transformers(tower)):
        with pytest.raises(ValueError, match=name.split()[0]):
            take(tower, False)
    served(other, False)
    ATTRIBUTES[name](other)
    with pytest.raises(ValueError, match=name.split()[0]):
        other(pixels, torch.tensor(GRIDS))


def test_another_rope_is_refused(tools) -> None:
    """KNOWN_FAILURES 34."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="rope_type 'linear' is none of"):
        VisionConfig.from_dict(tools.tiny | {"rope_parameters": rope})


def adapt(module, targets=("qkv", "linear_fc1")):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(module, LoraConfig(target_modules=list(targets), r=4))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    return adapted


@needs_peft
def test_lora_on_an_encoder_is_refused(encoder, pixels) -> None:
    """KNOWN_FAILURES 33: the adapters were left out, eagerly and from graphs."""
    encoder = copy.deepcopy(encoder)
    manager = EncoderCudaGraphManager(encoder, CompilationConfig(True, (64,), 4))
    manager.capture()
    batch = {"pixel_values": pixels, "image_grid_thw": GRIDS}
    before = manager.execute(batch)[0]
    adapted = adapt(encoder)
    refused = r"blocks\.0\.attn\.qkv is peft's Linear, an adapter.*merge_and_unload\(\)"
    for call in (lambda: manager.execute(batch), manager.capture, lambda: adapted(pixels, GRIDS)):
        with pytest.raises(ValueError, match=refused):
            call()
    merged = adapted.merge_and_unload()
    manager.capture()
    after = manager.execute(batch)[0]
    torch.testing.assert_close(after, merged(pixels, GRIDS))
    assert not torch.allclose(after, before, atol=1e-2)


@needs_peft
def test_lora_on_a_served_tower_is_refused(tower, pixels) -> None:
    """KNOWN_FAILURES 33."""
    holder = Holder(tower)
    replace_vision_tower(holder, CompilationConfig(True, (64,), 4))
    adapted = adapt(holder, ("qkv",))
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.qkv is peft's Linear, an adapter"):
        tower(pixels, torch.tensor(GRIDS))
    restore_vision_tower(adapted)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.qkv is peft's Linear, an adapter"):
        replace_vision_tower(adapted)


@needs_peft
def test_lora_beside_the_tower_is_no_hindrance(tower, pixels) -> None:
    """KNOWN_FAILURES 38: the tower is found under peft's wrappers."""
    holder = Holder(tower)
    holder.language_model = nn.ModuleDict({"q_proj": nn.Linear(8, 8)})
    adapted = adapt(holder, ("q_proj",))
    expected = tower(pixels, torch.tensor(GRIDS)).pooler_output
    replace_vision_tower(adapted)
    torch.testing.assert_close(tower(pixels, torch.tensor(GRIDS)).pooler_output, expected)


def test_tensor_subclasses_are_refused(tower, encoder, pixels) -> None:
    """KNOWN_FAILURES 35: torchao's weights are such; their address is nobody's."""
    for module, take in (
        (tower, lambda: served(tower, False)),
        (copied := copy.deepcopy(encoder), lambda: copied(pixels, GRIDS)),
    ):
        layer = module.blocks[0].attn.qkv
        layer.weight = nn.Parameter(TwoTensor(layer.weight.data, layer.weight.data))
        with pytest.raises(ValueError, match=r"blocks\.0\.attn\.qkv\.weight is a TwoTensor"):
            take()


def test_a_dispatched_tower_is_refused_in_a_sentence(tower) -> None:
    """KNOWN_FAILURES 36: what accelerate's device maps leave on modules."""
    for module in tower.modules():
        module._hf_hook, module.forward = object(), module.forward
    del tower._hf_hook, tower.forward
    with pytest.raises(ValueError, match=r"patch_embed is under accelerate's hooks \(a device map"):
        served(tower, False)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_a_sharded_tower_is_refused_in_a_sentence(tower, tmp_path) -> None:
    """KNOWN_FAILURES 36: FSDP2, on one rank."""
    from torch.distributed.fsdp import fully_shard

    store = f"file://{tmp_path / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        fully_shard(tower.blocks[0], mesh=mesh)
        with pytest.raises(ValueError, match=r"blocks\.0 is a FSDP.*leave the vision tower out"):
            served(tower, False)
    finally:
        torch.distributed.destroy_process_group()


def test_a_structure_names_what_changed(encoder) -> None:
    encoder = copy.deepcopy(encoder)
    structure = Structure(encoder)
    assert structure.unchanged() and structure.changed(encoder) == []
    assert why_not_plain(encoder, "the encoder's") is None
    encoder.blocks[2].norm2.eps = 0.5
    encoder.blocks[1].attn.proj = nn.Linear(144, 144)
    assert not structure.unchanged()
    assert structure.changed(encoder) == ["blocks.1.attn.proj", "blocks.2.norm2.eps"]
    assert copy.deepcopy(structure) is None
