"""Drafts of MTP modules against a module in plain torch, around transformers' own attention and experts."""

import json
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import family_of
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.speculation import check_speculation, mtp_graphs
from dcpmla.integrations.transformers import load_model
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime.graph import DecodeGraph
from dcpmla.runtime.mixed_graph import MixedGraph
from dcpmla.runtime.mtp import MtpDrafter
from dcpmla.runtime.sampling import SamplingParams
from tests.support.costs import DrawnCosts
from tests.support.engines import new_engine
from tests.support.layouts import dcp_config
from tests.support.models import MLA_FAMILIES, random_model, tiny_config
from tests.support.ranks import run_ranks

CPU, NUM_DRAFTS = torch.device("cpu"), 3
FAMILIES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "longcat_flash", "deepseek_v4")
FAMILIES += tuple(family for family in ("hy_v4",) if family in MLA_FAMILIES)
PROMPTS = [[5, 9, 2, 7, 7, 1, 30], [11, 12], [*range(40, 71)]]
Record = list[tuple[list[int], list[int]]]  # known tokens of a request, and the drafts that followed


class MtpNames(NamedTuple):
    """Names of a module's weights as published."""

    block: str
    mlp: str
    embedding_norm: str
    hidden_norm: str
    projections: tuple[str, ...]
    output_norm: str
    collapse: str = ""

    @classmethod
    def of(cls, config: Any) -> Self:
        if config.model_type == "longcat_flash":
            block = "model.mtp.layers.0"
            norms, mlp = (f"{block}.enorm.m.weight", f"{block}.hnorm.m.weight"), f"{block}.transformer_layer.mlp"
            return cls(block, mlp, *norms, (f"{block}.eh_proj.weight",), "model.mtp.norm.weight")
        is_v4, is_hy = config.model_type == "deepseek_v4", config.model_type == "hy_v4"
        block = "mtp.0" if is_v4 else "model.mtp_layers.0" if is_hy else f"model.layers.{config.num_hidden_layers}"
        own = f"{block}.mlp", f"{block}.enorm.weight", f"{block}.hnorm.weight"
        if is_v4:
            projections = f"{block}.e_proj.weight", f"{block}.h_proj.weight"
            return cls(block, *own, projections, f"{block}.norm.weight", f"{block}.hc_head_")
        last = f"{block}.final_layernorm.weight" if is_hy else f"{block}.shared_head.norm.weight"
        return cls(block, *own, (f"{block}.eh_proj.weight",), last)

    def all(self) -> list[str]:
        collapse = [self.collapse + part for part in ("fn", "base", "scale")] if self.collapse else []
        return [self.embedding_norm, self.hidden_norm, *self.projections, self.output_norm, *collapse]


class PlainMtp:
    """The report's module: norms of the embedding and of the hidden state, a projection of both, a decoder layer."""

    def __init__(self, family: str) -> None:
        torch.manual_seed(1)
        self.config = tiny_config(family)
        self.config.num_nextn_predict_layers = 1
        self.with_layer = random_model(family_of(self.config).with_mtp_layer(self.config))
        self.base = random_model(self.config, seed=0)
        state = self.with_layer.state_dict()
        self.base.load_state_dict({name: state[name] for name in self.base.state_dict()})
        layer, self.names = self.with_layer.model.layers[-1], MtpNames.of(self.config)
        if family == "longcat_flash":  # any of its layers has the parts of the module's, twice
            parts = layer.self_attn[0], layer.mlps[0], layer.input_layernorm[0], layer.post_attention_layernorm[0]
        else:
            parts = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
        self.attention, self.mlp, self.first_norm, self.second_norm = parts
        num_layers = self.config.num_hidden_layers
        shapes = family_of(self.config).mtp_shapes(self.config, f"model.layers.{num_layers}", {})
        published = {family_of(self.config).module_name(name, num_layers): name for name in self.names.all()}
        self.own = {
            published[name]: torch.rand(shape) + 0.5 if len(shape) == 1 else torch.randn(shape) * 0.2
            for name, shape in shapes.items()
            if "_layernorm" not in name
        }

    def save(self, directory: Path) -> Path:
        """Write it as checkpoints are published."""
        state = self.with_layer.state_dict() | self.own
        if self.config.model_type == "longcat_flash":
            modules = {f"{self.names.block}.self_attn": self.attention, self.names.mlp: self.mlp}
            modules |= {f"{self.names.block}.input_layernorm": self.first_norm}
            modules |= {f"{self.names.block}.post_attention_layernorm": self.second_norm}
            state = self.base.state_dict() | self.own
            state |= {
                f"{name}.{key}": value for name, part in modules.items() for key, value in part.state_dict().items()
            }
        if self.config.model_type in ("deepseek_v4", "hy_v4"):
            block = f"model.layers.{self.config.num_hidden_layers}."
            state = {name.replace(block, f"{self.names.block}."): tensor for name, tensor in state.items()}
        directory.mkdir()
        self.config.save_pretrained(directory)
        save_file({name: tensor.clone() for name, tensor in state.items()}, directory / "model.safetensors")
        return directory

    @torch.no_grad()
    def drafts(self, tokens: list[int], num_drafts: int) -> list[int]:
        """Draft after tokens, with all of the module's states computed anew each time."""
        hidden = self.base.model(torch.tensor([tokens])).last_hidden_state[:, :-1]
        tokens = list(tokens)
        for _ in range(num_drafts):
            out = self._run(torch.tensor([tokens[1:]]), hidden)
            tokens.append(int(self.base.lm_head(out[0, -1]).argmax()))
            hidden = torch.cat([hidden, out[:, -1:]], 1)
        return tokens[-num_drafts:]

    def _run(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = self._norm(self.base.model.embed_tokens(tokens), self.names.embedding_norm)
        joined = torch.cat([embedded, self._norm(hidden, self.names.hidden_norm)], -1)
        residual = joined @ self.own[self.names.projections[0]].T
        positions = torch.arange(tokens.shape[1])[None]
        mask = torch.full((tokens.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        how = {"position_embeddings": self.base.model.rotary_emb(residual, positions), "position_ids": positions}
        attended = self.attention(self.first_norm(residual), attention_mask=mask, **how)[0]
        residual = residual + attended
        return self._norm(residual + self.mlp(self.second_norm(residual)), self.names.output_norm)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.own[name], self.config.rms_norm_eps)


class PlainStreamMtp(PlainMtp):
    """DeepSeek-V4's module, by its published code: the embedding and each stream of the residual through projections of
    their own, and a decoder layer over their sum.
    """

    def drafts(self, tokens: list[int], num_drafts: int) -> list[int]:
        seen: list[Tensor] = []
        hook = self.base.model.hc_head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with torch.no_grad():
            self.base(torch.tensor([tokens]))
            hook.remove()
            streams, tokens = seen[0][:, :-1], list(tokens)
            for _ in range(num_drafts):
                out = self._run(torch.tensor([tokens[1:]]), streams)
                tokens.append(int(self.base.lm_head(self._collapse(out)[0, -1]).argmax()))
                streams = torch.cat([streams, out[:, -1:]], 1)
        return tokens[-num_drafts:]

    def _run(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        of_embedding, of_stream = (self.own[name] for name in self.names.projections)
        embedded = self._norm(self.base.model.embed_tokens(tokens), self.names.embedding_norm) @ of_embedding.T
        streams = embedded[:, :, None] + self._norm(hidden, self.names.hidden_norm) @ of_stream.T
        positions = torch.arange(tokens.shape[1])[None]
        distance = positions[0][:, None] - positions
        is_seen = (distance >= 0) & (distance < self.config.sliding_window)
        mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, -torch.inf)[None, None]
        rotary = self.base.model.rotary_emb
        angles = {kind: rotary(embedded, positions, layer_type=kind) for kind in ("main", "compress")}
        layer = self.with_layer.model.layers[-1]
        out: Tensor = layer(streams, position_embeddings=angles, position_ids=positions, attention_mask=mask)
        return out

    def _collapse(self, streams: Tensor) -> Tensor:
        fn, base, scale = (self.own[self.names.collapse + part] for part in ("fn", "base", "scale"))
        flat = streams.flatten(2)
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        weights = torch.sigmoid(flat @ fn.T * scale + base) + self.config.hc_eps
        return self._norm((weights[..., None] * streams).sum(2), self.names.output_norm)


def plain_module(family: str) -> PlainMtp:
    return PlainStreamMtp(family) if family == "deepseek_v4" else PlainMtp(family)


class Recording(MtpDrafter):
    """It drafts in every step, other numbers for other requests, and notes what."""

    drafts_always = True

    def draft(self, wanted: Any, previous: Any) -> Any:
        wanted = [(request, min(num, max(1, NUM_DRAFTS - request.request_id))) for request, num in wanted]
        drafts = super().draft(wanted, previous)
        flat = drafts.token_ids.tolist()
        for (request, _), num in zip(wanted, drafts.nums, strict=True):
            if num:
                tokens = request.tokens(0, request.num_known_tokens)
                if request.num_in_flight:
                    row = previous.rows[request]
                    num_accepted = 0 if previous.verified is None else int(previous.verified.num_accepted[row])
                    start = previous.starts[row]
                    tokens += previous.message.tokens[start : start + 1 + num_accepted].tolist()
                self.record.append((tokens, flat[:num]))
                flat = flat[num:]
        return drafts


def serve_families(
    directories: list[Path], tp: int, dcp_size: int, num_drafts: int = NUM_DRAFTS
) -> list[tuple[list[list[int]], Record]]:
    """On one rank: each model's tokens and drafts, eagerly and padded as graphs are."""
    dcp = dcp_config(tp, dcp_size, block_size=4, context_workspace_tokens=4 * 4 * dcp_size)
    mesh = init_mesh(tp, dcp_size)
    exchange = select_exchange(dcp, mesh.dcp_group, CPU)
    outcomes = []
    for directory in directories:
        config = load_config(directory)
        family_of(config).check_mtp(config)
        model = load_model(directory, config, dcp, mesh, exchange, torch.float32, CPU, with_mtp=True)
        model.keep_hidden_states(64)
        for with_graph in (False, True):
            plan = model.attention.plan_cache(dcp, [60] * 4, model.dtype, 4, num_drafts)
            cache: Any = plan.allocate(CPU)
            for memory in cache.tensors:
                memory.fill_(torch.nan)
            options: dict[str, Any] = {}
            if with_graph:
                steps = model.attention.step_builder(cache.sizes, dcp, mesh.dcp_rank, model.device)
                costs = DrawnCosts(0, absorbs=steps.absorbs_pieces)
                query_len = 1 + num_drafts
                options["costs"] = costs
                options["graph"] = DecodeGraph(model.decode, torch.tensor(0), cache, steps, mesh, 4, 100, query_len)
                options["mixed_graph"] = MixedGraph(model, cache, steps, mesh, 16, 4, 100, costs.tokens_per_request)
            graphs = [maker.make(cache) for maker in mtp_graphs(num_drafts, model, dcp, mesh, 4, 100)]
            drafter = Recording(num_drafts, model, cache, mesh, *graphs)
            drafter.record = []
            engine = new_engine(model, cache, dcp, mesh, 100, 16, 4, drafter=drafter, **options)
            params = SamplingParams(max_new_tokens=8, ignore_eos=True)
            requests = [engine.add(prompt, params, request_id=index) for index, prompt in enumerate(PROMPTS)]
            list(engine.run())
            assert engine.allocator.num_free == plan.num_blocks
            outcomes.append(([request.token_ids for request in requests], drafter.record))
    return outcomes


@pytest.mark.parametrize(
    ("tp", "dcp_size", "families", "num_drafts"),
    [(2, 2, FAMILIES, NUM_DRAFTS), (4, 2, ("deepseek_v3",), NUM_DRAFTS), (2, 2, ("deepseek_v3",), 1)],
)
def test_drafts_are_those_of_the_module(
    tp: int, dcp_size: int, families: tuple[str, ...], num_drafts: int, tmp_path: Path
) -> None:
    modules = [plain_module(family) for family in families]
    directories = [module.save(tmp_path / family) for module, family in zip(modules, families, strict=True)]
    ranks = run_ranks(tp, serve_families, directories, tp, dcp_size, num_drafts)
    assert all(outcome == ranks[0] for outcome in ranks[1:])
    for index, (tokens, record) in enumerate(ranks[0]):
        module = modules[index // 2]
        for prompt, new in zip(PROMPTS, tokens, strict=True):
            with torch.no_grad():
                logits = module.base(torch.tensor([prompt + new[:-1]])).logits[0, len(prompt) - 1 :]
            assert new == logits.argmax(-1).tolist()
        assert len(record) > 10
        for known, drafts in record[:: max(1, len(record) // 6)]:
            assert drafts == module.drafts(known, len(drafts)), (families[index // 2], index % 2, len(known))


def test_models_without_a_module_are_refused() -> None:
    with pytest.raises(ValueError, match="config has no num_nextn_predict_layers: leave --speculative-method mtp out"):
        family_of(tiny_config("mistral4")).check_mtp(tiny_config("mistral4"))
    check_speculation(tiny_config("deepseek_v4"), DCPConfig(), "ngram")
    scaled = DCPConfig(kv_cache_dtype="fp8", calculate_kv_scales=True)
    with pytest.raises(ValueError, match="leave --calculate-kv-scales out, or take ngram"):
        check_speculation(tiny_config("longcat_flash"), scaled, "mtp")
    check_speculation(tiny_config("mistral4"), DCPConfig(), "ngram")


@pytest.mark.parametrize(
    ("field", "layers", "window", "other"),
    [
        ("compress_ratios", [0, 4, 128], 0, 4),
        ("compress_ratios", [0, 4, 128], 0, 128),
        ("layer_types", ["sliding_attention"] * 3, "sliding_attention", "compressed_sparse_attention"),
    ],
)
def test_a_module_that_compresses_is_refused(
    field: str, layers: list[Any], window: int | str, other: int | str, tmp_path: Path
) -> None:
    """DeepSeek-V4's config has an entry of its module after the decoder layers'."""
    raw = json.loads(tiny_config("deepseek_v4").to_json_string())
    raw |= {"num_hidden_layers": 3, "num_nextn_predict_layers": 1, "layer_types": None, "mlp_layer_types": None}
    file = tmp_path / "config.json"
    for entries in ([], [window], [window, other]):  # the second module is never loaded
        file.write_text(json.dumps(raw | {field: layers + entries}))
        config = load_config(file)
        family_of(config).check_mtp(config)
        assert family_of(config).with_mtp_layer(config).layer_types[3] == "sliding_attention"
    file.write_text(json.dumps(raw | {field: [*layers, other]}))
    check_speculation(load_config(file), DCPConfig(), "ngram")
    with pytest.raises(ValueError, match=f"--speculative-method.*{field} has {other!r} for the MTP layer; it must be"):
        family_of(load_config(file)).check_mtp(load_config(file))


def test_a_checkpoint_without_a_module_is_refused(tmp_path: Path) -> None:
    module = PlainMtp("deepseek_v3")
    module.own = {}
    directory = module.save(tmp_path / "model")
    with pytest.raises(AssertionError, match=r"model\.layers\.2\.eh_proj\.weight of the MTP module is missing"):
        run_ranks(1, serve_families, [directory], 1, 1)
